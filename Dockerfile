# The command line with the tools for MariaDB 10.11 (the tools must be of the server's series).
FROM debian:bookworm-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bubblewrap ca-certificates gnupg mariadb-backup mariadb-client mariadb-server-core \
        python3 python3-venv util-linux zstd \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --system --gid 999 mysql \
    && useradd --system --uid 999 --gid mysql --home-dir /nonexistent --no-create-home \
        --shell /usr/sbin/nologin mysql

COPY . /opt/backupd
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir "/opt/backupd[postgresql]"

ENV PATH="/opt/venv/bin:$PATH"
ENTRYPOINT ["backupd"]
CMD ["--help"]
