CREATE TABLE episodes (
    episode_id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    spec TEXT NOT NULL,
    progress TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    machine_id TEXT NOT NULL,
    connection TEXT NOT NULL,
    lease_ttl_s REAL NOT NULL,
    expire_time_s REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE answers (
    kind TEXT NOT NULL,
    scope TEXT NOT NULL,
    request_id TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    answer TEXT NOT NULL,
    time_s REAL NOT NULL,
    PRIMARY KEY (scope, kind, request_id)
) WITHOUT ROWID;
CREATE TABLE machines (
    machine_id TEXT PRIMARY KEY,
    pool TEXT NOT NULL,
    enter_time_s REAL NOT NULL
) WITHOUT ROWID;
