-- Suspended attempts: what was ordered and is not confirmed yet, since when one stands still, and for how long it did before.
-- The host counts; the end of the lease moves on by what it tells.
ALTER TABLE attempt ADD COLUMN suspend_asked TEXT NOT NULL DEFAULT '' CHECK (suspend_asked IN ('', 'suspend', 'resume'));
ALTER TABLE attempt ADD COLUMN suspended_at_ms INTEGER;
ALTER TABLE attempt ADD COLUMN suspended_ms INTEGER NOT NULL DEFAULT 0 CHECK (suspended_ms >= 0);
CREATE INDEX attempt_to_suspend ON attempt (job_id) WHERE suspend_asked <> '';
-- Of a job over several hosts each rank counts for itself.
ALTER TABLE rank ADD COLUMN suspended INTEGER NOT NULL DEFAULT 0 CHECK (suspended IN (0, 1));
ALTER TABLE rank ADD COLUMN suspended_ms INTEGER NOT NULL DEFAULT 0 CHECK (suspended_ms >= 0);
