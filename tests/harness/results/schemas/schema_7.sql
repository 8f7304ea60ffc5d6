-- Tables as qnnfarm made them; words in curly brackets are the types of an engine.
CREATE TABLE qnnfarm_schema (
    version INTEGER NOT NULL,
    applied_at {moment} NOT NULL,
    qnnfarm_version VARCHAR(64) NOT NULL,
    PRIMARY KEY (version)
);
CREATE TABLE runs (
    id VARCHAR(32) NOT NULL,
    created_at {moment} NOT NULL,
    finished_at {moment},
    kind VARCHAR(32) NOT NULL,
    status VARCHAR(32) NOT NULL,
    error TEXT,
    writer TEXT NOT NULL,
    model TEXT NOT NULL,
    container_sha256 VARCHAR(64) NOT NULL,
    target TEXT NOT NULL,
    ars JSON NOT NULL,
    cl INTEGER NOT NULL,
    n_splits INTEGER NOT NULL,
    precision TEXT,
    container_bytes BIGINT,
    parameters BIGINT,
    device_serial TEXT NOT NULL,
    soc TEXT NOT NULL,
    emulator BOOLEAN NOT NULL,
    device_model TEXT,
    device_manufacturer TEXT,
    dsp_arch TEXT,
    abi TEXT,
    android_version TEXT,
    ram_bytes BIGINT,
    os_build TEXT,
    build_fingerprint TEXT,
    clocks JSON NOT NULL,
    runner TEXT NOT NULL,
    runner_sha256 VARCHAR(64),
    prompt_tokens INTEGER,
    depth_tokens INTEGER,
    max_new_tokens INTEGER,
    repetitions INTEGER NOT NULL,
    warmup INTEGER NOT NULL,
    sampler JSON NOT NULL,
    prompt TEXT,
    prompt_sha256 VARCHAR(64),
    dataset_sha256 VARCHAR(64),
    perplexity_positions VARCHAR(32),
    perplexity_windows INTEGER,
    perplexity_tokens INTEGER,
    toolchain TEXT NOT NULL,
    toolchain_versions JSON NOT NULL,
    library_versions JSON NOT NULL,
    qnnfarm_version TEXT NOT NULL,
    host TEXT NOT NULL,
    git_commit TEXT,
    git_dirty BOOLEAN,
    git_branch TEXT,
    origin_tool TEXT,
    origin_file TEXT,
    origin_sha256 VARCHAR(64),
    generated_text TEXT,
    group_id VARCHAR(32) NOT NULL,
    session INTEGER NOT NULL,
    label TEXT NOT NULL,
    labels JSON NOT NULL,
    "plan" TEXT,
    concurrent_sessions INTEGER,
    conditions JSON NOT NULL,
    check_outcome VARCHAR(32) NOT NULL,
    check_reason TEXT NOT NULL,
    warmup_detected BOOLEAN,
    PRIMARY KEY (id),
    CONSTRAINT failed_runs_have_an_error CHECK (status <> 'failed' OR error IS NOT NULL)
);
CREATE INDEX runs_by_group ON runs (group_id, session);
CREATE INDEX runs_by_subject ON runs (model, target, created_at);
CREATE INDEX runs_by_time ON runs (created_at);
CREATE TABLE artifacts (
    run_id VARCHAR(32) NOT NULL,
    name VARCHAR(200) NOT NULL,
    kind VARCHAR(32) NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    size_bytes BIGINT NOT NULL,
    PRIMARY KEY (run_id, name),
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE INDEX artifacts_by_content ON artifacts (sha256);
CREATE TABLE measurements (
    run_id VARCHAR(32) NOT NULL,
    metric VARCHAR(64) NOT NULL,
    is_warmup BOOLEAN NOT NULL,
    repetition INTEGER NOT NULL,
    value {double} NOT NULL,
    PRIMARY KEY (run_id, metric, is_warmup, repetition),
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE TABLE telemetry (
    run_id VARCHAR(32) NOT NULL,
    is_warmup BOOLEAN NOT NULL,
    repetition INTEGER NOT NULL,
    samples {bytes} NOT NULL,
    PRIMARY KEY (run_id, is_warmup, repetition),
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE TABLE comparisons (
    group_id VARCHAR(32) NOT NULL,
    created_at {moment} NOT NULL,
    metrics JSON NOT NULL,
    threshold {double} NOT NULL,
    verdicts JSON NOT NULL,
    PRIMARY KEY (group_id)
);
CREATE TABLE alerts (
    id VARCHAR(32) NOT NULL,
    series VARCHAR(80) NOT NULL,
    metric VARCHAR(64) NOT NULL,
    name TEXT NOT NULL,
    state VARCHAR(32) NOT NULL,
    began_at {moment} NOT NULL,
    found_at {moment} NOT NULL,
    ratio {double} NOT NULL,
    good_commit TEXT,
    bad_commit TEXT,
    note TEXT NOT NULL,
    created_at {moment} NOT NULL,
    changed_at {moment} NOT NULL,
    told_at {moment},
    PRIMARY KEY (id)
);
CREATE INDEX ix_alerts_series ON alerts (series);
CREATE TABLE reviews (
    runs VARCHAR(200) NOT NULL,
    PRIMARY KEY (runs)
);
