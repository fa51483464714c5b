-- name: write
INSERT INTO holdfast_lineage (event_id, type, correlation_id, causation_id, source, topic,
    message_key, time, outcome, service, error, at)
SELECT id, coalesce(type, CAST(:type AS text)), coalesce(correlation_id, id), causation_id,
    coalesce(source, CAST(:source AS text)), coalesce(topic, CAST(:topic AS text)), message_key,
    CAST(time AS double precision), CAST(:outcome AS text), CAST(:service AS text),
    CAST(:error AS text), (SELECT extract(epoch FROM clock_timestamp()))
FROM unnest(string_to_array(CAST(:ids AS text), chr(31)),
    string_to_array(CAST(:types AS text), chr(31)),
    string_to_array(CAST(:correlations AS text), chr(31), chr(30)),
    string_to_array(CAST(:causes AS text), chr(31), chr(30)),
    string_to_array(CAST(:sources AS text), chr(31)),
    string_to_array(CAST(:topics AS text), chr(31)),
    string_to_array(CAST(:keys AS text), chr(31), chr(30)),
    string_to_array(CAST(:times AS text), chr(31)))
    AS event (id, type, correlation_id, causation_id, source, topic, message_key, time)
