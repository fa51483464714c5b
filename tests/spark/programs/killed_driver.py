"""A driver that waits right before it commits, to be killed there.

    killed_driver.py PLACE SOURCE JAVA-OPTIONS

It has no connector jars, so it also says what a job without them is told.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.archive.adding import add
from holdfast.spark_jobs.archive.table import Archive
from holdfast.spark_jobs.session import session
from holdfast.spark_jobs.sources import read


class _Waiting(Archive):
    def commit(self, *_: Any, **__: Any) -> Any:
        sys.stdout.write("about to commit\n")
        sys.stdout.flush()
        while True:
            time.sleep(60)  # pacing: until it is killed


def main() -> None:
    """Tell of missing jars, then add to the archive until killed."""
    place, source, java = sys.argv[1:]
    conf = {"spark.sql.shuffle.partitions": "2", "spark.driver.extraJavaOptions": java}
    spark = session("killed", master="local[2,4]", conf=conf)
    for word in ("kafka://127.0.0.1:1?topic=a.b.dlq", "postgresql+psycopg://u@127.0.0.1:1/db",
                 "mysql+pymysql://u@127.0.0.1:1/db"):  # fmt: skip
        try:
            read(spark, word)
        except ConfigurationError as error:
            sys.stdout.write(f"{error}\n")
    sys.stdout.flush()
    add(_Waiting(spark, place), [source])


if __name__ == "__main__":
    main()
