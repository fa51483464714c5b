-- name: table
SELECT CAST(c.oid AS bigint) AS oid, n.nspname AS schema, c.relname AS name,
    quote_ident(n.nspname) || '.' || quote_ident(c.relname) AS quoted,
    has_table_privilege(c.oid, 'SELECT') AS readable, quote_ident(current_user) AS role
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = to_regclass(:table)
-- name: unidentified
SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname)
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND c.relreplident <> 'f' AND (
    c.oid = CAST(:oid AS oid)
    OR c.oid IN (SELECT relid FROM pg_partition_tree(CAST(CAST(:oid AS oid) AS regclass)))
) AND NOT EXISTS (
    SELECT 1 FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indimmediate AND i.indisvalid
    AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident END
)
ORDER BY 1 LIMIT 1
-- name: key
SELECT a.attname FROM pg_class AS c
JOIN pg_index AS i ON i.indrelid = c.oid
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey)
WHERE c.oid = CAST(:oid AS oid)
AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END
AND array_position(i.indkey, a.attnum) < i.indnkeyatts
ORDER BY array_position(i.indkey, a.attnum)
-- name: place
SELECT CAST(pg_current_wal_insert_lsn() AS text) AS log_end,
    CAST((SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout') AS float) / 1000
    AS patience
-- name: kind
SELECT typtype, typtypmod, CAST(typbasetype AS bigint) AS base,
    CASE WHEN typcategory = 'A' THEN CAST(typelem AS bigint) ELSE 0 END AS element
FROM pg_type WHERE oid = CAST(:oid AS oid)
