"""What `spark-submit` starts: `holdfast_job.py JOB …` is `holdfast spark JOB …` on its cluster."""

import sys

import holdfast
from holdfast.cli import main

if __name__ == "__main__":
    sys.stderr.write(f"holdfast from {holdfast.__path__[0]}\n")
    main(["spark", *sys.argv[1:]])
