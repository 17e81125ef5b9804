# The service and its commands, with the tools for MariaDB 10.11 (the tools must be of the server's series). It runs as
# root: datadirs belong to the database's user, keys and passwords to root, and prepared copies are started as the former.
FROM debian:bookworm-20261005-slim@sha256:7c7b2c966bc9ee8cedfeef67e0e279108992c77681fa595db4a9d65c06ccc587

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bubblewrap ca-certificates gnupg mariadb-backup mariadb-client mariadb-server-core mydumper \
        python3 python3-venv util-linux zstd \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --system --gid 999 mysql \
    && useradd --system --uid 999 --gid mysql --home-dir /nonexistent --no-create-home \
        --shell /usr/sbin/nologin mysql \
    && useradd --system --user-group --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin backupd-sandbox

COPY . /opt/backupd
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --require-hashes --requirement /opt/backupd/requirements.lock \
    && /opt/venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation /opt/backupd

ENV PATH="/opt/venv/bin:$PATH" PYTHONUNBUFFERED=1
EXPOSE 8642
# The streams of binary logs end in order, too: they do not outlive the container.
STOPSIGNAL SIGINT
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s --retries=4 CMD ["python3", "-c", \
    "import urllib.request as u; u.urlopen('http://127.0.0.1:8642/readyz', timeout=5)"]
ENTRYPOINT ["backupd"]
CMD ["serve"]
