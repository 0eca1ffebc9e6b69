"""A small ranker over what clients are told of the tools: BM25, as search over tool lists does it.

Chinese requests are put into English words first, by the longest match in a glossary of the field's ordinary terms: the
tools are told in English, and an agent that is asked in Chinese translates in the same way. The glossary knows words,
never sentences, and nothing of any tool.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

from cotenant.server.mcp.tool import Tool

#: The usual constants of Okapi BM25 (Robertson and Zaragoza 2009, section 3.5 gives the ranges).
K1, B = 1.2, 0.75
#: How often a name or title counts beside the text: they are what a reader sees first.
HEAD_WEIGHT = 3

_STOP = """
a about all also am an and any are as at be been before but by can could did do does done each else for from
had has have he her here his how i if in into is it its just like made make many may me moment more much my
need no not now of on or our out over own please really right same she should so some still than that the
their them then there these they this those to too up us use used want was we were what when where which
while who whom will with within without would you your
"""
STOP = frozenset(_STOP.split())

GLOSSARY = {
    "显卡": "gpu card", "卡": "card", "显存": "memory", "内存": "memory", "温度": "temperature", "利用率": "load",
    "空闲": "free", "可以用": "may take", "能用": "may take", "占用": "hold", "占": "get", "配额": "quota",
    "额度": "quota", "剩": "left", "上限": "limit cap", "型号": "model", "租约": "lease", "租": "lease",
    "申请": "get acquire", "自己": "yourself", "终端": "shell", "调试": "debug", "到期": "expire", "续": "renew",
    "心跳": "heartbeat", "还回去": "give back", "归还": "give back", "释放": "release", "用完": "no longer use",
    "转交": "hand over pass", "交给": "hand over", "代理": "agent", "另一个": "another", "提交": "submit", "训练": "train training",
    "任务": "job", "作业": "job", "后台": "detached", "试运行": "dry run", "命令": "command", "机器": "machine host",
    "主机": "host machine", "为什么": "why", "排队": "wait queue", "等待": "wait", "等": "wait until", "队列": "queue",
    "前面": "before order", "退出码": "exit code", "失败": "failed", "原因": "reason", "列出": "list", "运行": "run running",
    "跑": "run", "结束": "end", "批下来": "granted", "完成": "end", "日志": "log", "输出": "printed", "最后": "last",
    "几行": "lines", "标准错误": "stderr", "报错": "error", "停掉": "stop", "停止": "stop", "取消": "cancel",
    "重试": "again retry", "再跑一次": "run again", "再": "again", "信号": "signal", "保存": "save", "检查点": "checkpoint",
    "启动": "start starting", "别让": "keep from", "暂停": "hold", "挂起": "held", "继续": "go on", "掉线": "lost link",
    "在线": "on line", "驱动": "driver", "版本": "version", "共用": "share", "谁": "who", "事件": "event",
    "发生": "happened", "昨天晚上": "history since", "现在": "now", "还有": "", "几张": "how many", "多少": "how many",
    "哪些": "which", "哪台": "which", "优先级": "priority", "处理器": "processor", "调高": "raise", "解释": "explain", "怎样": "what help", "改成": "change", "改": "change", "时间限制": "hours time limit", "冻结": "freeze suspend",
    "留着": "keep", "磁盘": "disk", "预计": "estimate forecast", "什么时候": "when", "开始": "start", "建议": "suggest",
    "以前": "ended past", "小时": "hours",
}  # fmt: skip
_LONGEST = max(map(len, GLOSSARY))


def translated(text: str) -> str:
    """Chinese words of the glossary as English ones; what it does not know falls out, all else stays."""
    out, at = [], 0
    while at < len(text):
        if "\u4e00" <= text[at] <= "\u9fff":
            for length in range(min(_LONGEST, len(text) - at), 0, -1):
                if (found := GLOSSARY.get(text[at : at + length])) is not None:
                    out.append(f" {found} ")
                    at += length
                    break
            else:
                at += 1
        else:
            out.append(text[at])
            at += 1
    return "".join(out)


def words(text: str) -> list[str]:
    """Lower-case words with their commonest endings cut (a small part of Porter's first step), without stop words."""
    return [
        _stem(word) for word in re.findall(r"[a-z0-9]+", translated(text).lower().replace("'s", "")) if word not in STOP
    ]


def _stem(word: str) -> str:
    for ending in ("ings", "ing", "ies", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            if ending not in ("es", "s", "ies") and len(word) > 3 and word[-1] == word[-2] and word[-1] not in "sl":
                word = word[:-1]  # running -> runn -> run
            break
    return word[:-1] if word.endswith("e") and len(word) > 3 else word


class Ranker:
    """BM25 over names, titles and docstrings."""

    def __init__(self, tools: tuple[Tool, ...]) -> None:
        self._bags: Mapping[str, Counter[str]] = {
            tool.name: Counter(
                words(f"{tool.name.replace('_', ' ')} {tool.title} ") * HEAD_WEIGHT + words(tool.description)
            )
            for tool in tools
        }
        self._mean = sum(bag.total() for bag in self._bags.values()) / len(self._bags)
        self._in = Counter(word for bag in self._bags.values() for word in bag)

    def __call__(self, request: str) -> list[str]:
        """The names of all tools, the best first; equal ones by name."""
        asked = set(words(request))

        def score(name: str) -> float:
            bag = self._bags[name]
            norm = K1 * (1 - B + B * bag.total() / self._mean)
            return sum(self._idf(word) * bag[word] * (K1 + 1) / (bag[word] + norm) for word in asked if word in bag)

        return sorted(self._bags, key=lambda name: (-score(name), name))

    def _idf(self, word: str) -> float:
        found = self._in[word]
        return math.log(1 + (len(self._bags) - found + 0.5) / (found + 0.5))
