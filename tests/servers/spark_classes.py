"""Archives the classes of Spark for the JVMs of the tests: `spark_classes.py FILE`.

Starts Spark once, does a little of what the jobs do, and writes the classes that were loaded for
it. A JVM that maps them (`-XX:SharedArchiveFile`) starts in a third of the CPU time.
"""

import sys
import tempfile

from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as f

_ALSO = (
    "org.apache.spark.deploy.master.Master",
    "org.apache.spark.deploy.worker.Worker",
    "org.apache.spark.deploy.worker.ExecutorRunner",
    "org.apache.spark.executor.CoarseGrainedExecutorBackend",
    "org.apache.spark.scheduler.cluster.StandaloneSchedulerBackend",
    "org.apache.spark.deploy.client.StandaloneAppClient",
    "org.apache.spark.sql.connect.service.SparkConnectServer",
)


def main() -> None:
    """Do the work, end the JVM, and wait until it has written the file."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.extraJavaOptions",
                f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ArchiveClassesAtExit={sys.argv[1]}")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.connect.grpc.binding.port", "0")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        _work(spark, folder)
    for name in _ALSO:
        spark._jvm.java.lang.Class.forName(name)
    gateway = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


def _work(spark: SparkSession, folder: str) -> None:
    """Write, read, group, join, sort, stream, and serve Spark Connect."""
    made = spark.createDataFrame([(n, f"{n % 2}", bytes([n])) for n in range(9)],
                                 "id bigint, day string, body binary")  # fmt: skip
    made.hint("rebalance", "day").write.partitionBy("day").parquet(f"{folder}/files")
    frame = spark.read.schema(made.schema).parquet(f"{folder}/files").persist()
    nth = f.row_number().over(Window.partitionBy("day").orderBy(f.desc("id")))
    first = frame.withColumn("nth", nth).where("nth = 1").select("id", "day")
    groups = frame.groupBy("day").agg(
        f.count("*").alias("n"), f.collect_list("id"), f.min(f.struct("id", "day")),
        f.approx_count_distinct("id"), f.count_distinct("id"),
    )  # fmt: skip
    first.join(groups, "day").orderBy("n").limit(3).collect()
    frame.join(first, "id", "left_anti").mapInArrow(lambda found: found, frame.schema).count()
    frame.unpersist()
    (
        spark.readStream.schema(made.schema).parquet(f"{folder}/files")
        .writeStream.option("checkpointLocation", f"{folder}/checkpoint")
        .foreachBatch(lambda batch, _: batch.count()).trigger(availableNow=True)
        .start().awaitTermination()
    )  # fmt: skip
    connect = spark._jvm.org.apache.spark.sql.connect.service.SparkConnectService
    connect.start(spark.sparkContext._jsc.sc())
    never = spark._jvm.scala.Option.empty()
    connect.stop(never, never)


if __name__ == "__main__":
    main()
