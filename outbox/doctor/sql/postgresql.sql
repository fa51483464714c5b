-- name: privileges
SELECT bool_and(has_table_privilege(CAST(:table AS text), trim(one))) AS all_of_them,
    quote_ident(current_user)
FROM unnest(string_to_array(:needed, ',')) AS one
-- name: sequence
SELECT s.name, has_sequence_privilege(s.name, 'USAGE, UPDATE') AS usable
FROM pg_attribute AS a, pg_get_serial_sequence(CAST(:table AS text), 'seq') AS s (name)
WHERE a.attrelid = to_regclass(CAST(:table AS text)) AND a.attname = 'seq'
AND a.attidentity = '' AND s.name IS NOT NULL
-- name: settings
SELECT current_setting('wal_level') AS wal_level,
    current_setting('max_slot_wal_keep_size') AS keep
-- name: slots
SELECT slot_name, active, active_pid, wal_status, safe_wal_size,
    CAST(confirmed_flush_lsn AS text) AS confirmed,
    pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn) AS retained,
    age(xmin) AS xmin_age, age(catalog_xmin) AS catalog_xmin_age
FROM pg_replication_slots ORDER BY restart_lsn NULLS FIRST
-- name: log_end
SELECT CAST(pg_current_wal_lsn() AS text)
-- name: grown
SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), CAST(:start AS pg_lsn))
-- name: publication
SELECT EXISTS (SELECT 1 FROM pg_replication_slots WHERE slot_name = :slot) AS has_slot,
    EXISTS (SELECT 1 FROM pg_publication WHERE pubname = :name) AS is_there,
    EXISTS (
        SELECT 1 FROM pg_publication_tables AS p
        JOIN pg_class AS c ON c.relname = p.tablename
        JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = p.schemaname
        WHERE p.pubname = :name AND c.oid = to_regclass(:table)
    ) AS has_table
-- name: holders
SELECT pid, usename, application_name, state, query,
    backend_xmin IS NOT NULL AS holds_xmin,
    extract(epoch FROM clock_timestamp() - xact_start) AS age
FROM pg_stat_activity
WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
AND pid <> pg_backend_pid() AND backend_type <> 'walsender'
AND xact_start < clock_timestamp() - make_interval(secs => :least)
ORDER BY xact_start LIMIT :most
-- name: hidden
-- Without pg_read_all_stats PostgreSQL shows of others' sessions neither kind nor times.
SELECT pid, usename, quote_ident(current_user) AS role FROM pg_stat_activity
WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
AND pid <> pg_backend_pid() AND backend_type IS NULL AND usesysid IS NOT NULL
ORDER BY age(coalesce(backend_xmin, backend_xid)) DESC
-- name: prepared
SELECT gid, extract(epoch FROM clock_timestamp() - prepared) AS age FROM pg_prepared_xacts
WHERE prepared < clock_timestamp() - make_interval(secs => :least)
ORDER BY prepared LIMIT :most
-- name: horizon
SELECT holder, age FROM (
    SELECT 'pid ' || pid, age(backend_xmin) FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND datname = current_database()
    UNION ALL
    SELECT 'slot ' || slot_name, age(xmin) FROM pg_replication_slots
    UNION ALL
    SELECT 'prepared transaction ' || gid, age(transaction) FROM pg_prepared_xacts
    WHERE database = current_database()
) AS one (holder, age) WHERE age IS NOT NULL ORDER BY age DESC LIMIT 1
-- name: bloat
SELECT s.n_dead_tup AS dead, pg_total_relation_size(c.oid) AS bytes, c.reloptions AS options,
    current_setting('autovacuum') AS autovacuum,
    extract(epoch FROM clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum)) AS vacuumed
FROM pg_class AS c LEFT JOIN pg_stat_user_tables AS s ON s.relid = c.oid
WHERE c.oid = to_regclass('holdfast_outbox')
