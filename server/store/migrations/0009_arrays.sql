-- Arrays of jobs, jobs that wait for others, and the time in which a job may start.
-- An array is one job (array_id = id) until its elements start; each of them is then a job of its own.

ALTER TABLE job ADD COLUMN array_id TEXT;                         -- of an element its array, of an array itself
ALTER TABLE job ADD COLUMN array_index INTEGER;                   -- of an element
ALTER TABLE job ADD COLUMN retry_of TEXT;                         -- the job that this one tries again
ALTER TABLE job ADD COLUMN waits_for INTEGER NOT NULL DEFAULT 0 CHECK (waits_for >= 0);  -- dependencies not met
ALTER TABLE job ADD COLUMN opens_at_ms INTEGER NOT NULL DEFAULT 0;  -- start window
ALTER TABLE job ADD COLUMN closes_at_ms INTEGER;
CREATE UNIQUE INDEX one_job_per_element ON job (array_id, array_index) WHERE array_index IS NOT NULL;
CREATE INDEX element_living ON job (array_id)
    WHERE array_index IS NOT NULL AND state NOT IN ('succeeded', 'failed', 'cancelled');

-- Lists show an array as one row: what they go by leaves its elements out, which also costs these nothing.
DROP INDEX job_final;
DROP INDEX job_by_caller;
DROP INDEX job_by_owner;
DROP INDEX job_by_time;
DROP INDEX job_same_spec;
CREATE INDEX job_listed ON job (id) WHERE array_index IS NULL;
CREATE INDEX job_final ON job (state, id) WHERE array_index IS NULL AND state IN ('succeeded', 'failed', 'cancelled');
CREATE INDEX job_by_caller ON job (caller, id) WHERE array_index IS NULL;
CREATE INDEX job_by_owner ON job (owner, id) WHERE array_index IS NULL;
CREATE INDEX job_by_time ON job (submitted_at_ms, id) WHERE array_index IS NULL;
CREATE INDEX job_same_spec ON job (caller, spec_hash, submitted_at_ms) WHERE array_index IS NULL;

-- Of each index exactly one holds: it is in `todo` from `next_index` on, in `on_hold`, in `dropped`, or has a job.
-- Sets of indices are written as ranges: 0-41,57.
CREATE TABLE array (
    job_id       TEXT PRIMARY KEY REFERENCES job (id),
    size         INTEGER NOT NULL CHECK (size BETWEEN 1 AND 100000),  -- indices are below it
    indices      TEXT NOT NULL,                   -- those of this array: all, or the ones that are tried again
    max_parallel INTEGER CHECK (max_parallel >= 1),
    todo         TEXT NOT NULL,                   -- what waits to be started, in ascending order
    next_index   INTEGER NOT NULL DEFAULT 0,      -- lower ones have left `todo`
    on_hold      TEXT NOT NULL DEFAULT '',
    dropped      TEXT NOT NULL DEFAULT '',        -- cancelled before they started
    has_params   INTEGER NOT NULL DEFAULT 0 CHECK (has_params IN (0, 1)),
    -- How many elements are where; moved with the element.
    pending      INTEGER NOT NULL CHECK (pending >= 0),               -- in todo
    held         INTEGER NOT NULL DEFAULT 0 CHECK (held >= 0),        -- in on_hold
    waiting      INTEGER NOT NULL DEFAULT 0 CHECK (waiting >= 0),     -- started once and in the queue again
    running      INTEGER NOT NULL DEFAULT 0 CHECK (running >= 0),     -- with a living attempt
    succeeded    INTEGER NOT NULL DEFAULT 0 CHECK (succeeded >= 0),
    failed       INTEGER NOT NULL DEFAULT 0 CHECK (failed >= 0),
    cancelled    INTEGER NOT NULL DEFAULT 0 CHECK (cancelled >= 0)    -- of them those in `dropped` have no job
) STRICT;

-- Sets of parameters, 64 to a row: the set of an index is number index % 64 of row index / 64.
CREATE TABLE array_params (
    array_id TEXT NOT NULL,
    part     INTEGER NOT NULL,
    params   TEXT NOT NULL,                       -- JSON, a list of objects
    PRIMARY KEY (array_id, part)
) STRICT, WITHOUT ROWID;

-- What a job waits for: another job, an element, or elements `first` to `last` of an array.
CREATE TABLE dependency (
    job_id     TEXT NOT NULL REFERENCES job (id),
    on_job     TEXT NOT NULL,
    first      INTEGER NOT NULL DEFAULT -1,       -- -1: the job as a whole
    last       INTEGER NOT NULL DEFAULT -1,
    needs      TEXT NOT NULL CHECK (needs IN ('ok', 'any', 'failed')),
    todo       INTEGER NOT NULL DEFAULT 1 CHECK (todo >= 0),  -- of them not over
    failed     INTEGER NOT NULL DEFAULT 0,        -- of them ended failed
    cancelled  INTEGER NOT NULL DEFAULT 0,        -- of them ended cancelled
    met        INTEGER NOT NULL DEFAULT 0 CHECK (met IN (0, 1)),
    PRIMARY KEY (job_id, on_job, first, last)
) STRICT, WITHOUT ROWID;
CREATE INDEX dependency_open ON dependency (on_job, first) WHERE met = 0;
