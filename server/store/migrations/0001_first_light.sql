-- Callers, hosts, leases, jobs, attempts and the event log. Every table STRICT, every state CHECKed; what must
-- never happen (two leases on a slot, two live attempts of a job, a repeated fence) is an index, not a habit.

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;

-- Counters that only rise: fence, incarnation.
CREATE TABLE counter (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL CHECK (value >= 0)
) STRICT;
CREATE TRIGGER counter_only_rises BEFORE UPDATE ON counter WHEN NEW.value < OLD.value
BEGIN SELECT RAISE(ABORT, 'a counter never falls'); END;
INSERT INTO counter (name, value) VALUES ('fence', 0), ('incarnation', 0);

CREATE TABLE caller (
    name            TEXT PRIMARY KEY,
    kind            TEXT NOT NULL CHECK (kind IN ('human', 'agent')),
    owner           TEXT NOT NULL,
    created_at_ms   INTEGER NOT NULL,
    last_seen_at_ms INTEGER,
    client          TEXT
) STRICT;

CREATE TABLE token (
    id            TEXT PRIMARY KEY,
    hash          TEXT NOT NULL UNIQUE,           -- SHA-256 of the secret; the secret itself is shown once
    caller        TEXT NOT NULL REFERENCES caller (name),
    scopes        TEXT NOT NULL,                  -- comma separated
    toolset       TEXT NOT NULL DEFAULT 'full' CHECK (toolset IN ('full', 'core')),
    pools         TEXT NOT NULL DEFAULT '',       -- comma separated, empty = all
    max_priority  INTEGER NOT NULL DEFAULT 30,
    autopilot     INTEGER NOT NULL DEFAULT 0 CHECK (autopilot IN (0, 1)),
    own_only      INTEGER NOT NULL DEFAULT 0 CHECK (own_only IN (0, 1)),
    created_at_ms INTEGER NOT NULL,
    created_by    TEXT NOT NULL,
    expires_at_ms INTEGER,
    revoked_at_ms INTEGER
) STRICT;

CREATE TABLE host (
    name             TEXT PRIMARY KEY,
    state_id         TEXT,
    boot_id          TEXT,
    max_fence        INTEGER NOT NULL DEFAULT 0,
    control_seq      INTEGER NOT NULL DEFAULT 0,  -- newest report taken
    mode             TEXT NOT NULL DEFAULT 'ready'
        CHECK (mode IN ('ready', 'draining', 'drained', 'quarantined', 'unclassified', 'read_only')),
    mode_reason      TEXT NOT NULL DEFAULT '',
    cpu_places       INTEGER NOT NULL DEFAULT 2,
    facts            TEXT NOT NULL DEFAULT '{}',
    first_seen_at_ms INTEGER NOT NULL,
    last_seen_at_ms  INTEGER
) STRICT;

CREATE TABLE gpu (
    uuid             TEXT PRIMARY KEY,            -- one card belongs to one host entry
    host             TEXT NOT NULL REFERENCES host (name),
    idx              INTEGER NOT NULL,
    name             TEXT NOT NULL,
    memory_mib       INTEGER NOT NULL,
    capability       TEXT NOT NULL DEFAULT '',
    pool             TEXT NOT NULL,
    shares           INTEGER NOT NULL DEFAULT 1 CHECK (shares BETWEEN 1 AND 8),
    simulated        INTEGER NOT NULL DEFAULT 0 CHECK (simulated IN (0, 1)),
    present          INTEGER NOT NULL DEFAULT 1 CHECK (present IN (0, 1)),
    first_seen_at_ms INTEGER NOT NULL,
    last_seen_at_ms  INTEGER NOT NULL
) STRICT;
CREATE INDEX gpu_of_host ON gpu (host, idx);

CREATE TABLE lease (
    id             TEXT PRIMARY KEY,
    kind           TEXT NOT NULL CHECK (kind IN ('job', 'direct')),
    state          TEXT NOT NULL
        CHECK (state IN ('queued', 'leased', 'running', 'released', 'expired', 'revoked', 'withdrawn')),
    caller         TEXT NOT NULL,
    owner          TEXT NOT NULL,
    human          INTEGER NOT NULL CHECK (human IN (0, 1)),
    pool           TEXT NOT NULL,
    priority       INTEGER NOT NULL,
    needs          TEXT NOT NULL,                 -- JSON of the wish, for claims that wait
    gpus           INTEGER NOT NULL,              -- cards held (asked for, while queued)
    units          INTEGER NOT NULL DEFAULT 0,    -- 840 a card
    fence          INTEGER UNIQUE,
    purpose        TEXT NOT NULL DEFAULT '',
    job_id         TEXT,
    host           TEXT,
    hours_ms       INTEGER NOT NULL,
    hours_from     TEXT NOT NULL,
    ttl_s          INTEGER,
    queued_at_ms   INTEGER NOT NULL,
    granted_at_ms  INTEGER,
    expires_at_ms  INTEGER,
    hard_end_at_ms INTEGER,
    pickup_by_ms   INTEGER,
    missed_pickups INTEGER NOT NULL DEFAULT 0,
    draining       INTEGER NOT NULL DEFAULT 0 CHECK (draining IN (0, 1)),
    ended_at_ms    INTEGER,
    end_reason     TEXT,
    CHECK ((state IN ('leased', 'running')) <= (fence IS NOT NULL AND granted_at_ms IS NOT NULL AND hard_end_at_ms IS NOT NULL)),
    CHECK ((state IN ('released', 'expired', 'revoked', 'withdrawn')) = (ended_at_ms IS NOT NULL)),
    CHECK ((kind = 'job') = (job_id IS NOT NULL))
) STRICT;
CREATE INDEX lease_living ON lease (state) WHERE state IN ('queued', 'leased', 'running');
CREATE INDEX lease_by_caller ON lease (caller, queued_at_ms);
CREATE INDEX lease_by_end ON lease (ended_at_ms);
CREATE TRIGGER lease_fence_only_rises BEFORE UPDATE OF fence ON lease WHEN NEW.fence < OLD.fence
BEGIN SELECT RAISE(ABORT, 'a fence never falls'); END;

CREATE TABLE lease_slot (
    lease_id TEXT NOT NULL REFERENCES lease (id),
    host     TEXT NOT NULL,
    uuid     TEXT NOT NULL,                       -- 'cpu' for a place without a card
    share    INTEGER NOT NULL,
    shares   INTEGER NOT NULL,
    idx      INTEGER,
    use      TEXT NOT NULL CHECK (use IN ('held', 'cleaning', 'occupied', 'freed')),
    since_ms INTEGER NOT NULL,
    detail   TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (lease_id, host, uuid, share)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX one_lease_per_slot ON lease_slot (host, uuid, share) WHERE use <> 'freed';
CREATE INDEX slots_in_use ON lease_slot (use) WHERE use <> 'freed';

CREATE TABLE job (
    id              TEXT PRIMARY KEY,
    state           TEXT NOT NULL
        CHECK (state IN ('held', 'queued', 'provisioning', 'deploying', 'running', 'suspended', 'stopping',
                         'preempted', 'lost', 'succeeded', 'failed', 'cancelled')),
    name            TEXT NOT NULL,
    caller          TEXT NOT NULL,
    owner           TEXT NOT NULL,
    human           INTEGER NOT NULL CHECK (human IN (0, 1)),
    pool            TEXT NOT NULL,
    priority        INTEGER NOT NULL,
    spec            TEXT NOT NULL,
    spec_hash       TEXT NOT NULL,
    hours_ms        INTEGER NOT NULL,
    hours_from      TEXT NOT NULL,
    epoch           INTEGER NOT NULL DEFAULT 0,   -- newest attempt
    fence           INTEGER,                      -- of the newest attempt
    attempts_left   INTEGER NOT NULL,
    quick_failures  INTEGER NOT NULL DEFAULT 0,
    resumed         INTEGER NOT NULL DEFAULT 0 CHECK (resumed IN (0, 1)),
    not_before_ms   INTEGER NOT NULL DEFAULT 0,
    avoid           TEXT NOT NULL DEFAULT '[]',   -- hosts and cards at fault, JSON
    held_reason     TEXT,
    stop_reason     TEXT,
    stop_confirmed  TEXT,
    exit_code       INTEGER,
    failure_class   TEXT,
    message         TEXT,
    submitted_at_ms INTEGER NOT NULL,
    queued_at_ms    INTEGER NOT NULL,
    started_at_ms   INTEGER,
    ended_at_ms     INTEGER,
    changed_at_ms   INTEGER NOT NULL,
    CHECK ((state IN ('succeeded', 'failed', 'cancelled')) = (ended_at_ms IS NOT NULL)),
    CHECK (state <> 'held' OR held_reason IS NOT NULL),
    CHECK (state <> 'stopping' OR stop_reason IS NOT NULL)
) STRICT;
CREATE INDEX job_living ON job (state) WHERE state NOT IN ('succeeded', 'failed', 'cancelled');
CREATE INDEX job_same_spec ON job (caller, spec_hash, submitted_at_ms);
CREATE INDEX job_by_time ON job (submitted_at_ms, id);
CREATE TRIGGER job_final_is_final BEFORE UPDATE OF state ON job
WHEN OLD.state IN ('succeeded', 'failed', 'cancelled') AND NEW.state <> OLD.state
BEGIN SELECT RAISE(ABORT, 'a final state is final'); END;
CREATE TRIGGER job_epoch_only_rises BEFORE UPDATE OF epoch ON job WHEN NEW.epoch < OLD.epoch
BEGIN SELECT RAISE(ABORT, 'an epoch never falls'); END;

CREATE TABLE attempt (
    id            TEXT PRIMARY KEY,
    job_id        TEXT NOT NULL REFERENCES job (id),
    epoch         INTEGER NOT NULL,
    lease_id      TEXT NOT NULL REFERENCES lease (id),
    fence         INTEGER NOT NULL UNIQUE,
    host          TEXT NOT NULL,
    state         TEXT NOT NULL
        CHECK (state IN ('intended', 'starting', 'running', 'stopping', 'lost', 'ended')),
    created_at_ms INTEGER NOT NULL,
    started_at_ms INTEGER,
    ended_at_ms   INTEGER,
    pid           INTEGER,
    start_ticks   INTEGER,
    boot_id       TEXT,
    stop_reason   TEXT,
    exit          TEXT,                           -- JSON of the exit record
    exit_code     INTEGER,
    failure_class TEXT,
    message       TEXT,
    superseded    INTEGER NOT NULL DEFAULT 0 CHECK (superseded IN (0, 1)),
    UNIQUE (job_id, epoch),
    CHECK ((state = 'ended') = (ended_at_ms IS NOT NULL))
) STRICT;
CREATE UNIQUE INDEX one_live_attempt_per_job ON attempt (job_id) WHERE state <> 'ended';
CREATE INDEX attempt_living ON attempt (host) WHERE state <> 'ended';
CREATE INDEX attempt_of_lease ON attempt (lease_id);

CREATE TABLE event (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    at_ms      INTEGER NOT NULL,
    type       TEXT NOT NULL,
    severity   TEXT NOT NULL CHECK (severity IN ('info', 'warning', 'critical')),
    caller     TEXT NOT NULL,
    owner      TEXT NOT NULL,                     -- whose object it is about; decides who sees inside
    door       TEXT NOT NULL,
    job_id     TEXT,
    attempt_id TEXT,
    run_id     TEXT,
    lease_id   TEXT,
    host       TEXT,
    gpu_uuid   TEXT,
    pool       TEXT,
    token_id   TEXT,
    old        TEXT,
    new        TEXT,
    reason     TEXT,
    request_id TEXT,
    args       TEXT NOT NULL DEFAULT '{}'
) STRICT;
CREATE INDEX event_by_job ON event (job_id, id) WHERE job_id IS NOT NULL;
CREATE INDEX event_by_type ON event (type, id);
CREATE TRIGGER event_never_changes BEFORE UPDATE ON event
BEGIN SELECT RAISE(ABORT, 'events are never changed'); END;
CREATE TRIGGER event_never_goes BEFORE DELETE ON event
BEGIN SELECT RAISE(ABORT, 'events are never deleted'); END;

-- Answers to writes that carried a request_id, kept 7 days.
CREATE TABLE request (
    caller        TEXT NOT NULL,
    request_id    TEXT NOT NULL,
    verb          TEXT NOT NULL,
    args_hash     TEXT NOT NULL,
    object_id     TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    PRIMARY KEY (caller, request_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX request_by_age ON request (created_at_ms);

-- A question that was asked, bound to caller, act, object and the object's state; spent in the act's transaction.
CREATE TABLE confirmation (
    hash          TEXT PRIMARY KEY,
    caller        TEXT NOT NULL,
    act           TEXT NOT NULL,
    object_id     TEXT NOT NULL,
    object_state  TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    expires_at_ms INTEGER NOT NULL,
    used_at_ms    INTEGER
) STRICT;

-- hand_over: an offer waits for the other caller's consent.
CREATE TABLE offer (
    object_id     TEXT PRIMARY KEY,
    giver         TEXT NOT NULL,
    receiver      TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    expires_at_ms INTEGER NOT NULL
) STRICT;
