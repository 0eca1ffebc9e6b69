-- People who are logged in to the page. The cookie holds the id and a signature over it; the key that signs is a
-- file of its own, so a copy of this table opens nothing.
CREATE TABLE session (
    id            TEXT PRIMARY KEY,
    token_id      TEXT NOT NULL REFERENCES token (id),  -- revoked or expired, it ends the session
    created_at_ms INTEGER NOT NULL,
    expires_at_ms INTEGER NOT NULL CHECK (expires_at_ms > created_at_ms),
    ended_at_ms   INTEGER                               -- logged out
) STRICT;
CREATE INDEX session_by_end ON session (expires_at_ms);
CREATE INDEX session_living ON session (token_id, created_at_ms) WHERE ended_at_ms IS NULL;

-- What ended lately is asked at every look of the page.
CREATE INDEX job_by_end ON job (ended_at_ms) WHERE ended_at_ms IS NOT NULL;
