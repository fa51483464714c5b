"""Consumer groups, where the broker does not share the lanes of a topic among its members itself.

In comes what a broker keeps of a group (a `GroupStore`: heartbeats, owners, epochs); out go lanes
that come and go in order, and a listener that hears of each. A lane has one owner at a time, what
its owner settled before it left is safe, and the rest goes to the next owner without blame.
"""
