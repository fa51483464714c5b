"""The books of the shop: stock, accounts, and a ledger of everything that was done and undone."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, func, insert, select

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

ITEMS = 5
STOCK = 10_000
BALANCE = 1_000_000

tables = MetaData()
effects = Table(
    "shop_effects",
    tables,
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("what", String(20), nullable=False),
    Column("owner", String(40), nullable=False),
    Column("amount", Integer, nullable=False),
)
stock = Table(
    "shop_stock",
    tables,
    Column("item", Integer, primary_key=True, autoincrement=False),
    Column("left", Integer, nullable=False),
)
accounts = Table(
    "shop_accounts",
    tables,
    Column("customer", String(40), primary_key=True),
    Column("balance", Integer, nullable=False),
)


def item_of(order: str) -> int:
    """Return what *order* is for."""
    return zlib.crc32(order.encode()) % ITEMS


def open_books(engine: Engine, customers: list[str]) -> None:
    """Make the tables, with full shelves and full accounts."""
    tables.create_all(engine)
    with engine.begin() as db:
        db.execute(insert(stock), [{"item": item, "left": STOCK} for item in range(ITEMS)])
        db.execute(insert(accounts), [{"customer": one, "balance": BALANCE} for one in customers])


def totals(engine: Engine) -> tuple[int, int]:
    """Return what is on the shelves and on the accounts."""
    with engine.connect() as db:
        left = db.execute(select(func.sum(stock.c.left))).scalar_one()
        balance = db.execute(select(func.sum(accounts.c.balance))).scalar_one()
    return int(left), int(balance)


def ledger(engine: Engine) -> list[tuple[str, str, int]]:
    """Return every effect, in order."""
    wanted = select(effects.c.what, effects.c.owner, effects.c.amount).order_by(effects.c.seq)
    with engine.connect() as db:
        return [(row.what, row.owner, row.amount) for row in db.execute(wanted)]
