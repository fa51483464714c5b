-- name: key
SELECT a.attname FROM pg_index AS i
JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
WHERE i.indisprimary AND i.indrelid = to_regclass(:table)
ORDER BY array_position(i.indkey, a.attnum)
-- name: table
SELECT n.nspname, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = to_regclass(:table)
-- name: log_end
SELECT CAST(pg_current_wal_insert_lsn() AS text)
