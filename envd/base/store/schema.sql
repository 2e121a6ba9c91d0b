CREATE TABLE episodes (
    episode_id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL,
    parent_episode_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    pool TEXT NOT NULL,
    run TEXT NOT NULL,
    owner TEXT NOT NULL,
    max_steps INTEGER NOT NULL,
    settle TEXT NOT NULL,
    origin TEXT NOT NULL,
    create_time_s REAL NOT NULL,
    machine_id TEXT NOT NULL,
    state TEXT NOT NULL,
    end_reason TEXT NOT NULL,
    cause TEXT NOT NULL,
    step_count INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    last_checkpoint_id TEXT NOT NULL,
    automatic TEXT NOT NULL,
    last_action TEXT NOT NULL,
    verdict TEXT NOT NULL,
    asked TEXT NOT NULL,
    bearings TEXT NOT NULL,
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
