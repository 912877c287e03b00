# docker build --target cpu  -t nmoe-data:0.1.0 .
# docker build --target cuda -t nmoe-data:0.1.0-cuda .
# For Linux on x86-64. Python is that of requirements.lock; each wheel is checked against its SHA-256.
FROM python:3.11-slim AS locked
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
RUN python -m venv /opt/venv
WORKDIR /build
COPY requirements.lock deploy/torch-cpu.lock deploy/torch-cuda.lock ./
# Without the packages of tests, and without `film`, whose wheel contains a GPL build of ffmpeg.
RUN grep -Ev '; (tests|film)$' requirements.lock > image.lock \
    && pip install --no-deps --only-binary :all: --require-hashes -r image.lock

FROM locked AS project
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY scripts scripts
COPY loader loader
COPY nmoe nmoe
COPY nmoe_core nmoe_core
COPY nmoe_assets nmoe_assets
# setuptools is the one of the lock.
RUN pip wheel --no-deps --no-build-isolation --wheel-dir wheels ./loader .

FROM locked AS with-cpu
RUN pip install --no-deps --only-binary :all: --require-hashes -r torch-cpu.lock
COPY --from=project /build/wheels wheels
RUN pip install --no-deps wheels/*.whl && pip check

FROM locked AS with-cuda
RUN pip install --no-deps --only-binary :all: --require-hashes -r torch-cuda.lock
COPY --from=project /build/wheels wheels
RUN pip install --no-deps wheels/*.whl && pip check

FROM python:3.11-slim AS base
# The id is no account of the host. The directories are for volumes, which take over their owner.
RUN useradd --uid 10001 --create-home nmoe \
    && install -d -o nmoe -g nmoe /data /opt/dagster/dagster_home
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 DAGSTER_HOME=/opt/dagster/dagster_home DAGSTER_DISABLE_TELEMETRY=yes
WORKDIR /data
CMD ["nmoe", "--help"]

FROM base AS cuda
# Triton compiles its launcher with a C compiler. The driver comes from the host.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=with-cuda /opt/venv /opt/venv
USER 10001:10001

FROM base AS cpu
COPY --from=with-cpu /opt/venv /opt/venv
USER 10001:10001
