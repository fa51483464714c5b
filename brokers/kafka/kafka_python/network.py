"""kafka-python's IO loop, with callbacks brought to the thread that called the client."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

from kafka.errors import KafkaConnectionError, SaslAuthenticationFailedError
from kafka.future import Future
from kafka.net.compat import KafkaNetClient
from kafka.net.inet import KafkaNetSocket
from kafka.net.selector import NetworkSelector

from holdfast.brokers.kafka.client_log import spoken_to

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from holdfast.brokers.kafka.client_log import ClientLog

_LOOK_SECONDS = 1.0


class TidyLoop(NetworkSelector):  # type: ignore[misc]
    """Closes, with itself, the sockets of connections that were only half made."""

    log: ClientLog
    """Decides which failed tries are written to the log."""

    def __init__(self, **configs: Any) -> None:
        super().__init__(**configs)
        self._sockets: set[socket.socket] = set()

    def run_forever(self) -> None:
        """Run in the IO thread, which speaks to the log."""
        with spoken_to(self.log):
            super().run_forever()

    def keep(self, connected: socket.socket) -> None:
        """Take note of a socket; those closed meanwhile are forgotten."""
        self._sockets = {sock for sock in self._sockets if sock.fileno() >= 0} | {connected}

    def close(self) -> None:
        """Stop, and close what is left."""
        super().close()
        while self._sockets:
            self._sockets.pop().close()


class CallerLoop(TidyLoop):
    """Lets whoever waits for the IO thread work for it meanwhile.

    kafka-python calls rebalance listeners in its IO thread, where settling would block the
    heartbeats and a commit is impossible. The polling thread only waits at that time, so
    the work is handed to it: it may settle, commit and use its own connections.
    """

    def __init__(self, **configs: Any) -> None:
        super().__init__(**configs)
        self.patience = float("inf")
        self._inboxes: list[queue.SimpleQueue[Callable[[], None] | None]] = []

    def run(self, coro: Any, *args: Any) -> Any:
        """Run *coro* in the IO thread and return its result, doing errands while waiting."""
        io_thread = self._io_thread
        if io_thread is None or threading.current_thread() is io_thread:
            return super().run(coro, *args)
        inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._inboxes.append(inbox)
        try:
            future = self.call_soon_with_future(coro, *args)
            future.add_both(lambda _: inbox.put(None))
            waited = 0.0
            while True:
                try:
                    errand = inbox.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    waited += _LOOK_SECONDS
                    if not io_thread.is_alive():
                        raise KafkaConnectionError("the client's IO thread died") from None
                    if waited > self.patience:
                        raise KafkaConnectionError(
                            f"the client's IO thread has been silent for {waited:g} s"
                        ) from None
                    continue
                if errand is None:
                    break
                errand()
                waited = 0.0
        finally:
            self._inboxes.remove(inbox)
        if future.exception is not None:
            raise future.exception
        return future.value

    async def in_caller(self, work: Callable[[], None]) -> None:
        """From the IO thread: run *work* in the waiting thread; the loop goes on meanwhile."""
        done = Future()

        def errand() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever awaits
                caught = error
                self.call_soon_threadsafe(lambda: done.failure(caught))
            else:
                self.call_soon_threadsafe(lambda: done.success(None))

        self._inboxes[-1].put(errand)
        await done


class TidySocket(KafkaNetSocket):  # type: ignore[misc]
    """Leaves no socket to the garbage collector, as kafka-python would."""

    SCHEMES = ("holdfast",)

    async def sock_connect(
        self, net: Any, sock: socket.socket, sockaddr: Any, timeout_at: float | None = None
    ) -> socket.socket:
        """Connect or close."""
        try:
            await super().sock_connect(net, sock, sockaddr, timeout_at=timeout_at)
        except BaseException:
            sock.close()
            raise
        net.keep(sock)
        return sock


class Network:
    """Makes kafka-python's network client and remembers it, to close it when all else fails."""

    def __init__(
        self,
        log: ClientLog,
        loop: type[TidyLoop] = TidyLoop,
        *,
        patience: float = float("inf"),
    ) -> None:
        self._log = log
        self._loop = loop
        self._patience = patience
        self._client: Any = None

    def __call__(self, **configs: Any) -> Any:
        """Return the client for *configs*; kafka-python calls this."""
        if configs.get("proxy_url") is None and configs.get("socks5_proxy") is None:
            configs["proxy_url"] = f"{TidySocket.SCHEMES[0]}://"
        self.loop: Any = self._loop(**configs)
        self.loop.log = self._log
        self.loop.patience = self._patience
        self._client = KafkaNetClient(net=self.loop, **configs)
        return self._client

    @property
    def is_cut_off(self) -> bool:
        """Whether no connection stands."""
        return not any(conn.connected for conn in list(self._client._manager._conns.values()))

    def complaint(self) -> Exception | None:
        """Return why the servers cannot be talked to: the client tries on and does not say."""
        manager = self._client._manager

        async def first_answer() -> None:
            server = manager.cluster.bootstrap_brokers()[0].node_id
            manager.reset_backoff(server)
            await manager.wait_for(manager.call_soon(wait, server), _LOOK_SECONDS * 1000)

        async def wait(server: Any) -> None:
            connection = manager.get_connection(server)
            try:
                await connection
            except KafkaConnectionError as error:
                # Kafka did answer the first question. Its answer to a wrong password comes
                # with the end of the connection, which kafka-python may see first.
                if (
                    connection.broker_version_data is None
                    or manager.config["sasl_mechanism"] is None
                ):
                    raise
                raise SaslAuthenticationFailedError("the server hung up") from error

        try:
            self.loop.run(first_answer)
        except Exception as error:  # noqa: BLE001 - the answer
            return error
        return None

    def close(self) -> None:
        """Release threads and sockets that a failed constructor left behind."""
        if self._client is not None:
            self._client.close()
