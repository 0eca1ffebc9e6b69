-- A job over several hosts: one attempt, one lease, and on each host a rank with processes of its own.
CREATE TABLE rank (
    id            TEXT PRIMARY KEY,               -- what its host calls it: the attempt's id, a dot, the rank
    attempt_id    TEXT NOT NULL REFERENCES attempt (id),
    rank          INTEGER NOT NULL CHECK (rank >= 0),
    host          TEXT NOT NULL,
    state         TEXT NOT NULL
        CHECK (state IN ('intended', 'starting', 'ready', 'running', 'stopping', 'lost', 'ended')),
    started_at_ms INTEGER,
    ended_at_ms   INTEGER,
    pid           INTEGER,
    start_ticks   INTEGER,
    boot_id       TEXT,
    exit          TEXT,                           -- JSON of the exit record
    exit_code     INTEGER,
    failure_class TEXT,
    message       TEXT,
    clean         INTEGER NOT NULL DEFAULT 0 CHECK (clean IN (0, 1)),  -- nothing of it is left on its host
    UNIQUE (attempt_id, rank),
    UNIQUE (attempt_id, host),
    CHECK ((state = 'ended') = (ended_at_ms IS NOT NULL))
) STRICT;
CREATE INDEX rank_living ON rank (host) WHERE state <> 'ended';
CREATE TRIGGER rank_ended_is_ended BEFORE UPDATE OF state ON rank WHEN OLD.state = 'ended' AND NEW.state <> 'ended'
BEGIN SELECT RAISE(ABORT, 'an ended rank stays ended'); END;

ALTER TABLE attempt ADD COLUMN nodes INTEGER NOT NULL DEFAULT 1 CHECK (nodes >= 1);
ALTER TABLE attempt ADD COLUMN port INTEGER;        -- where the ranks meet, on the first host
ALTER TABLE attempt ADD COLUMN go_at_ms INTEGER;    -- all ranks were ready, and may begin
ALTER TABLE attempt ADD COLUMN failed_rank INTEGER; -- the first that failed, by which all are judged
CREATE UNIQUE INDEX one_gang_per_port ON attempt (port) WHERE port IS NOT NULL AND state <> 'ended';
-- With its attempt every rank has ended in the records; a host that knows better is told to stop it.
CREATE TRIGGER attempt_ends_its_ranks AFTER UPDATE OF state ON attempt WHEN NEW.state = 'ended' AND NEW.nodes > 1
BEGIN
    UPDATE rank SET state = 'ended', ended_at_ms = NEW.ended_at_ms, message = coalesce(message, NEW.message)
    WHERE attempt_id = NEW.id AND state <> 'ended';
END;
