-- What was forecast for a waiting job, so that forecasts can be compared with what then happened.
CREATE TABLE forecast (
    id             INTEGER PRIMARY KEY,
    job_id         TEXT NOT NULL REFERENCES job (id),
    made_at_ms     INTEGER NOT NULL,
    earliest_at_ms INTEGER NOT NULL,
    likely_at_ms   INTEGER NOT NULL,
    latest_at_ms   INTEGER                     -- NULL: not if all use their time limits
) STRICT;
CREATE INDEX forecast_of_job ON forecast (job_id, made_at_ms);
CREATE INDEX forecast_by_time ON forecast (made_at_ms);
CREATE INDEX attempt_by_end ON attempt (ended_at_ms) WHERE ended_at_ms IS NOT NULL;
