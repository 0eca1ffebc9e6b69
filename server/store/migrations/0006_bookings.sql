-- What a lease books on each of its hosts, and whether it wants them for itself. In the row, so that the transaction
-- of a grant can add up what is booked, whatever the job's spec says by then.
ALTER TABLE lease ADD COLUMN cpus INTEGER NOT NULL DEFAULT 0 CHECK (cpus >= 0);
ALTER TABLE lease ADD COLUMN memory_mib INTEGER NOT NULL DEFAULT 0 CHECK (memory_mib >= 0);
ALTER TABLE lease ADD COLUMN disk_mib INTEGER NOT NULL DEFAULT 0 CHECK (disk_mib >= 0);
ALTER TABLE lease ADD COLUMN exclusive INTEGER NOT NULL DEFAULT 0 CHECK (exclusive IN (0, 1));

UPDATE lease SET
    cpus = coalesce((SELECT json_extract(spec, '$.cpus') FROM job WHERE job.id = lease.job_id), 0),
    memory_mib = coalesce((SELECT json_extract(spec, '$.memory_mib') FROM job WHERE job.id = lease.job_id), 0),
    disk_mib = coalesce((SELECT json_extract(spec, '$.disk_mib') FROM job WHERE job.id = lease.job_id), 0)
WHERE kind = 'job' AND id IN (SELECT lease_id FROM lease_slot WHERE use <> 'freed');
