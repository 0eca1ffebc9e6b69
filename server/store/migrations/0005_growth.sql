-- Indexes so that nothing which is asked often walks a table that only grows. Of what lives and of what people look for
-- most ones are partial: they cost nothing while a row moves through its states.

CREATE INDEX request_by_object ON request (object_id);
CREATE INDEX confirmation_by_end ON confirmation (expires_at_ms);
CREATE INDEX offer_by_end ON offer (expires_at_ms);
CREATE INDEX token_of_caller ON token (caller);

CREATE INDEX event_notable ON event (id) WHERE severity <> 'info';
CREATE INDEX event_critical ON event (id) WHERE severity = 'critical';
CREATE INDEX event_by_time ON event (at_ms);
CREATE INDEX event_by_run ON event (run_id, id) WHERE run_id IS NOT NULL;

CREATE INDEX job_final ON job (state, id) WHERE state IN ('succeeded', 'failed', 'cancelled');
CREATE INDEX job_by_caller ON job (caller, id);
CREATE INDEX job_by_owner ON job (owner, id);

CREATE INDEX lease_final ON lease (state, id) WHERE state IN ('released', 'expired', 'revoked', 'withdrawn');
-- In the order in which they are listed, and for what an owner holds too.
DROP INDEX lease_by_caller;
CREATE INDEX lease_by_holder ON lease (caller, id);
CREATE INDEX lease_by_owner ON lease (owner, id);

-- Databases of the first days were made without it.
CREATE INDEX IF NOT EXISTS lease_by_end ON lease (ended_at_ms);
