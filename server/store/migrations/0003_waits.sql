-- A wait that a client follows as a protocol task (docs/mcp.md). The id itself is not kept, only its hash.
CREATE TABLE wait (
    hash          TEXT PRIMARY KEY,
    caller        TEXT NOT NULL,
    subject       TEXT NOT NULL,                  -- the job or lease waited for; ending the wait never touches it
    state         TEXT NOT NULL CHECK (state IN ('working', 'completed', 'cancelled')),
    cursor        TEXT NOT NULL,                  -- of the events, as the wait began
    created_at_ms INTEGER NOT NULL,
    changed_at_ms INTEGER NOT NULL,
    until_ms      INTEGER NOT NULL,               -- the wait ends by then, whatever the subject does
    expires_at_ms INTEGER NOT NULL,               -- the id is forgotten from then on
    result        TEXT,                           -- JSON: what the waiting call would have answered
    CHECK ((state = 'completed') = (result IS NOT NULL))
) STRICT;
CREATE INDEX wait_by_age ON wait (expires_at_ms);
CREATE INDEX wait_by_caller ON wait (caller) WHERE state = 'working';
