"""RabbitMQ through AMQP 0-9-1: `amqp://user:password@host:port/vhost`, `amqps://`.

What there is on the broker (`:` and `%` inside a topic or group are written `%3A` and `%25`):

| name | what |
|---|---|
| exchange `<topic>` | direct; the routing key is the number of the lane |
| queue `<topic>:lanes` | its `x-max-length` is the number of lanes; holds as many messages |
| queue `<topic>:<group>:<lane>` | quorum, single active consumer; what a group has yet to settle |
| queue `<topic>:<group>:ready` | empty; says that the group's queues are old enough to be safe |
| queue `<topic>:<group>:<lane>:owner`, `…:members`, `…:hungry` | empty; their consumers count |
| exchange and queue `:delay:<milliseconds>` | where delayed releases wait |

Order per key: the publisher gives each key one lane (CRC-32 of the key modulo n, keyless
messages in turn) and sends on one channel; a lane is one queue; its only active consumer has
one channel. The number of lanes is fixed by the broker when the topic is first declared.

There is no log of messages: a group gets what is published after its first member came, or
after `create_group`. A message that no group would get is refused (`UnknownTopic`).

A message on the wire: persistent, `message_id` and `timestamp` set, its CloudEvents attributes
as headers `cloudEvents:…`, the key among them as `cloudEvents:partitionkey` or, if it is empty
or no text, `cloudEvents:partitionkeybase64`; `datacontenttype` is the property `content_type`.
All header values are long strings of raw bytes, a name that repeats has an array, None is
void. RabbitMQ sorts headers when it delivers again, so `holdfast-order` holds the names in
order where that matters, and a message's own header that has a name in use here gets the
prefix `holdfast-own-`; `holdfast-null` marks a body that is null and not just empty, and
`holdfast-deliveries` counts the deliveries before a delay; `holdfast-nameless` says that the
`message_id` of a delayed message only stands for the one it never had.

Messages of others need none of that. One without `message_id` is recognised by its content when
it comes again, or not at all (see `identity` in the settings): AMQP gives it no coordinates.
"""

from holdfast.brokers.rabbitmq.broker import RabbitBroker

__all__ = ["RabbitBroker"]
