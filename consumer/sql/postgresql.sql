-- One question for a whole poll: is anything known about any of its messages? If not, as nearly
-- always, they are marked as begun. The marks of what has ended go as well. Each element of a list
-- is looked up by itself (OFFSET 0): of a fresh table the planner knows nothing, and would compare
-- each row with each element.
-- name: begin_unless_known
WITH known AS MATERIALIZED (
    SELECT EXISTS (
            SELECT FROM json_array_elements_text(CAST(:ids AS json)) AS id, LATERAL (
                SELECT FROM holdfast_attempt
                WHERE consumer = CAST(:consumer AS text) AND message_id = id OFFSET 0) AS one)
        OR EXISTS (
            SELECT FROM json_array_elements_text(CAST(:ids AS json)) AS id, LATERAL (
                SELECT owner, alone FROM holdfast_start
                WHERE consumer = CAST(:consumer AS text) AND message_id = id OFFSET 0) AS one
            WHERE one.owner <> CAST(:owner AS text) AND one.alone >= 0)
        OR EXISTS (
            SELECT FROM json_array_elements_text(CAST(:lanes AS json)) AS lane, LATERAL (
                SELECT FROM holdfast_held_key
                WHERE grp = CAST(:grp AS text) AND topic = CAST(:topic AS text)
                    AND key_hash = lane OFFSET 0) AS one)
        OR EXISTS (
            SELECT FROM json_array_elements_text(CAST(:names AS json)) AS named, LATERAL (
                SELECT FROM holdfast_dlq_message WHERE message_id = named OFFSET 0) AS one)
        OR EXISTS (
            SELECT FROM json_array_elements_text(CAST(:keys AS json)) AS hashed, LATERAL (
                SELECT state, topic, consumer_group FROM holdfast_dlq_message
                WHERE key_hash = hashed OFFSET 0) AS one
            WHERE one.state = 'pending' AND one.topic = CAST(:own_topic AS text)
                AND one.consumer_group = CAST(:own_group AS text)) AS anything
), begun AS (
    INSERT INTO holdfast_start (consumer, message_id, owner, alone, at)
    SELECT CAST(:consumer AS text), id, CAST(:owner AS text), 0, extract(epoch FROM clock_timestamp())
    FROM json_array_elements_text(CAST(:ids AS json)) AS id
    WHERE NOT (SELECT anything FROM known)
    ON CONFLICT (consumer, message_id, owner) DO UPDATE SET alone = excluded.alone, at = excluded.at
), ended AS (
    DELETE FROM holdfast_start
    WHERE (consumer, message_id, owner) IN (SELECT CAST(:consumer AS text), id, CAST(:owner AS text)
        FROM json_array_elements_text(CAST(:ended AS json)) AS id
        LIMIT json_array_length(CAST(:ended AS json)))
)
SELECT anything FROM known

-- The same while nothing waits at all: no message of the handler has a history, no key of the group
-- is held, no dead letter is open. Then no message has to be looked up by its id or its key, but for
-- a start elsewhere. Whoever finds the contrary asks `begin_unless_known`. Sorted as the indexes
-- are: old statistics would have a whole table read.
-- name: begin_while_quiet
WITH known AS MATERIALIZED (
    SELECT EXISTS (
            SELECT FROM json_array_elements_text(CAST(:ids AS json)) AS id, LATERAL (
                SELECT owner, alone FROM holdfast_start
                WHERE consumer = CAST(:consumer AS text) AND message_id = id OFFSET 0) AS one
            WHERE one.owner <> CAST(:owner AS text) AND one.alone >= 0)
        OR EXISTS (
            SELECT FROM (
                SELECT FROM holdfast_attempt WHERE consumer = CAST(:consumer AS text)
                ORDER BY consumer, message_id LIMIT 1) AS one)
        OR EXISTS (
            SELECT FROM (
                SELECT FROM holdfast_held_key WHERE grp = CAST(:grp AS text)
                ORDER BY grp, topic, key_hash LIMIT 1) AS one)
        OR EXISTS (
            SELECT FROM (
                SELECT FROM holdfast_dlq_message WHERE state = 'pending'
                ORDER BY state, stored_at LIMIT 1) AS one) AS anything
), begun AS (
    INSERT INTO holdfast_start (consumer, message_id, owner, alone, at)
    SELECT CAST(:consumer AS text), id, CAST(:owner AS text), 0, extract(epoch FROM clock_timestamp())
    FROM json_array_elements_text(CAST(:ids AS json)) AS id
    WHERE NOT (SELECT anything FROM known)
    ON CONFLICT (consumer, message_id, owner) DO UPDATE SET alone = excluded.alone, at = excluded.at
), ended AS (
    DELETE FROM holdfast_start
    WHERE (consumer, message_id, owner) IN (SELECT CAST(:consumer AS text), id, CAST(:owner AS text)
        FROM json_array_elements_text(CAST(:ended AS json)) AS id
        LIMIT json_array_length(CAST(:ended AS json)))
)
SELECT anything FROM known
