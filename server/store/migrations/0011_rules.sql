-- What people set at run time, above the configuration. The events hold its history: this is only what is in force.
CREATE TABLE rule (
    scope     TEXT NOT NULL CHECK (scope IN ('pool', 'owner', 'agent')),
    name      TEXT NOT NULL,
    key       TEXT NOT NULL,
    value     TEXT NOT NULL,                      -- JSON; null = no limit
    set_by    TEXT NOT NULL,
    set_at_ms INTEGER NOT NULL,
    reason    TEXT NOT NULL,
    PRIMARY KEY (scope, name, key)
) STRICT, WITHOUT ROWID;

-- Cards of a pool that a person booked for an owner.
CREATE TABLE reservation (
    id            TEXT PRIMARY KEY,
    pool          TEXT NOT NULL,
    owner         TEXT NOT NULL,
    cards         INTEGER NOT NULL CHECK (cards > 0),
    begin_ms      INTEGER NOT NULL,
    end_ms        INTEGER NOT NULL CHECK (end_ms > begin_ms),
    set_by        TEXT NOT NULL,
    set_at_ms     INTEGER NOT NULL,
    reason        TEXT NOT NULL,
    removed_at_ms INTEGER,
    removed_by    TEXT,
    CHECK ((removed_at_ms IS NULL) = (removed_by IS NULL))
) STRICT;
CREATE INDEX reservation_coming ON reservation (end_ms) WHERE removed_at_ms IS NULL;
