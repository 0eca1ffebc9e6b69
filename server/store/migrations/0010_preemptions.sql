-- Notices to running jobs: preemption for a higher priority, eviction by a person, and a save that was asked for. The row is
-- the intent; the loop repeats what it says until it is over.
CREATE TABLE preemption (
    id                  TEXT PRIMARY KEY,
    reason              TEXT NOT NULL CHECK (reason IN ('preempt', 'evict', 'save')),
    state               TEXT NOT NULL CHECK (state IN ('noticed', 'stopping', 'done', 'withdrawn')),
    pool                TEXT NOT NULL,
    asker_id            TEXT,                     -- the job or claim that gets the slots
    asker_owner         TEXT,
    ordered_by          TEXT NOT NULL,
    why                 TEXT NOT NULL,
    slots               TEXT NOT NULL DEFAULT '[]',  -- [[host, uuid, share]], kept for the asker while it lives
    grace_s             INTEGER NOT NULL,
    noticed_at_ms       INTEGER NOT NULL,
    stopping_at_ms      INTEGER,
    asker_started_at_ms INTEGER,
    asker_lease_id      TEXT,
    wasted_at_ms        INTEGER,                  -- the asker did nothing with what it got
    judged              INTEGER NOT NULL DEFAULT 0 CHECK (judged IN (0, 1)),  -- whether it did was looked at
    ended_at_ms         INTEGER,
    outcome             TEXT,
    CHECK ((state IN ('done', 'withdrawn')) = (ended_at_ms IS NOT NULL)),
    CHECK ((reason = 'preempt') = (asker_id IS NOT NULL))
) STRICT;
CREATE UNIQUE INDEX one_preemption_per_pool ON preemption (pool) WHERE reason = 'preempt' AND state IN ('noticed', 'stopping');
CREATE INDEX preemption_living ON preemption (state) WHERE state IN ('noticed', 'stopping');
CREATE INDEX preemption_of_asker ON preemption (asker_id) WHERE asker_id IS NOT NULL;
CREATE INDEX preemption_wasted ON preemption (wasted_at_ms) WHERE wasted_at_ms IS NOT NULL;
CREATE INDEX preemption_unjudged ON preemption (asker_started_at_ms) WHERE asker_started_at_ms IS NOT NULL AND judged = 0;

CREATE TABLE victim (
    preemption_id TEXT NOT NULL REFERENCES preemption (id),
    attempt_id    TEXT NOT NULL REFERENCES attempt (id),
    job_id        TEXT NOT NULL REFERENCES job (id),
    lease_id      TEXT NOT NULL REFERENCES lease (id),
    host          TEXT NOT NULL,
    told_at_ms    INTEGER,                        -- its host has given it the notice
    saved         INTEGER NOT NULL DEFAULT 0 CHECK (saved IN (0, 1)),  -- a complete checkpoint newer than the notice
    checkpoint    TEXT,                           -- path of what it goes on from
    stopped_at_ms INTEGER,                        -- its stop was ordered
    grace_used_ms INTEGER,
    ended_at_ms   INTEGER,
    lost_ms       INTEGER,                        -- work since that checkpoint
    outcome       TEXT,
    PRIMARY KEY (preemption_id, attempt_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX victim_of_job ON victim (job_id, stopped_at_ms);
CREATE INDEX victim_of_attempt ON victim (attempt_id);

ALTER TABLE attempt ADD COLUMN checkpoint TEXT;    -- JSON: the newest that was seen complete
ALTER TABLE attempt ADD COLUMN resumed_from TEXT;  -- path of the checkpoint that it goes on from
ALTER TABLE job ADD COLUMN preempt_agreed TEXT;    -- who agreed that it may be preempted though it starts from zero then
ALTER TABLE lease ADD COLUMN idle_notice_ms INTEGER;  -- when its holder was told that it is idle
