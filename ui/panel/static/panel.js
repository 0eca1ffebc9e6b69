// Keeps the page up to date. Without it the page says the same and loads itself again now and then.
"use strict";
(() => {
  // A one-time link: with JavaScript its button presses itself.
  const link = document.querySelector("form[data-send]");
  if (link) { link.requestSubmit(); return; }

  const board = document.getElementById("board");
  const live = document.getElementById("live");
  if (!board || !live) return;
  const says = document.getElementById("live-says");
  const QUIET_MS = 25000; // the server gives a sign every 15 s
  let skew = 0;           // the server's clock less ours
  let heard = Date.now(); // when the server last said anything
  let stream = null, busy = false, again = false, retry = null;

  const two = (n) => String(n).padStart(2, "0");
  const span = (seconds) => { // as words.py says it
    const s = Math.max(0, Math.floor(seconds));
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min`;
    if (s < 86400) return `${Math.floor(s / 3600)} h ${two(Math.floor(s % 3600 / 60))} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor(s % 86400 / 3600)} h`;
  };
  const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  const clock = (ms) => new Date(ms).toISOString().slice(11, 19);

  const tick = () => {
    const now = Date.now() + skew;
    for (const time of board.querySelectorAll("time[data-form]")) {
      const at = Date.parse(time.dateTime);
      const form = time.dataset.form;
      if (form === "ago") put(time, `${span((now - at) / 1000)} ago`);
      else if (form === "for") put(time, span((now - at) / 1000));
      else put(time, `in ${span((at - now) / 1000)}`);
    }
    const at = Date.parse(document.getElementById("now").dataset.at);
    const late = Date.now() - heard > QUIET_MS || (stream && stream.readyState !== EventSource.OPEN);
    if (document.hidden || !stream) return;
    live.dataset.state = late ? "late" : "on";
    put(says, late ? `The server does not answer. This is as of ${clock(at)} UTC, ${span((now - at) / 1000)} ago.`
      : `Live. Last change ${clock(at)} UTC.`);
  };

  // Make `now` look like `next` and keep what is the same: focus, selection and a reader's place stay.
  const key = (node) => node.nodeType === 1 ? node.dataset.key || node.id || node.nodeName : node.nodeName;
  const morph = (now, next) => {
    if (now.nodeType !== 1) { if (now.nodeValue !== next.nodeValue) now.nodeValue = next.nodeValue; return; }
    for (const { name, value } of [...next.attributes]) if (now.getAttribute(name) !== value) now.setAttribute(name, value);
    for (const { name } of [...now.attributes]) if (!next.hasAttribute(name)) now.removeAttribute(name);
    const old = new Map();
    for (const child of now.childNodes) {
      if (!old.has(key(child))) old.set(key(child), []);
      old.get(key(child)).push(child);
    }
    let here = now.firstChild;
    for (const wanted of [...next.childNodes]) {
      const same = (old.get(key(wanted)) || []).shift();
      if (same) {
        if (same === here) here = here.nextSibling; else now.insertBefore(same, here);
        morph(same, wanted);
      } else now.insertBefore(document.importNode(wanted, true), here);
    }
    for (const rest of old.values()) for (const child of rest) child.remove();
  };

  const look = async () => {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const answer = await fetch("board", { credentials: "same-origin", cache: "no-store" });
      if (answer.status === 401) { location.reload(); return; }
      if (answer.ok) {
        const next = document.createElement("main");
        next.append(...new DOMParser().parseFromString(await answer.text(), "text/html").body.childNodes);
        for (const { name, value } of [...board.attributes]) next.setAttribute(name, value);
        morph(board, next);
        heard = Date.now();
        skew = Date.parse(document.getElementById("now").dataset.at) - heard;
        document.title = `${document.getElementById("now-h").textContent} · Cotenant`;
      }
    } catch { /* the server is away: tick says so, and the stream tries again */ }
    busy = false;
    tick();
    if (again) { again = false; look(); }
  };

  const close = () => { clearTimeout(retry); if (stream) stream.close(); stream = null; };
  const open = () => {
    close();
    stream = new EventSource("live");
    stream.addEventListener("changed", () => { heard = Date.now(); look(); });
    stream.addEventListener("end", () => { stream.close(); look(); retry = setTimeout(open, 3000); });
    stream.onerror = () => { // closed for good: too many streams, a session that is over, or a server that is away
      if (stream.readyState === EventSource.CLOSED) { look(); retry = setTimeout(open, 15000); }
      tick();
    };
  };
  // A browser has few connections to one address: tabs that nobody looks at hold none.
  document.addEventListener("visibilitychange", () => { if (document.hidden) close(); else { heard = Date.now(); open(); } });
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", (event) => { if (event.persisted) open(); });
  setInterval(tick, 1000);
  if (!document.hidden) open();
})();
