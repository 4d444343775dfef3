//! The same storage against versitygw, which checks signatures, checksums and conditions (`cargo xtask roots versitygw`).

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use sterna_s3::{CredentialsSource, S3Objects, S3Options};
use sterna_store::{
    CacheOptions, CachedObjects, Condition, ImageStore, Objects, RangeCache, StoreError, WriteOptions,
};

use crate::images::{assert_has, blocks, fill, noise, open};

const LIMIT: Duration = Duration::from_secs(60);

/// A running versitygw whose bucket is `DIRECTORY/bucket`.
struct Gateway {
    process: Child,
    port: u16,
    directory: tempfile::TempDir,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Gateway {
    fn start(program: &Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("bucket")).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let process = Command::new(program)
            .env("ROOT_ACCESS_KEY", "access")
            .env("ROOT_SECRET_KEY", "secret")
            .args(["--port", &format!("127.0.0.1:{port}"), "posix"])
            .arg(directory.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let gateway = Self { process, port, directory };
        let deadline = Instant::now() + LIMIT;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < deadline, "versitygw does not listen");
            std::thread::sleep(Duration::from_millis(50));
        }
        gateway
    }

    fn options(&self, secret: &str) -> S3Options {
        let json = format!(r#"printf '{{"AccessKeyId":"access","SecretAccessKey":"{secret}"}}'"#);
        S3Options {
            credentials: CredentialsSource::Command(json),
            // The least that S3 accepts.
            part_bytes: 5 << 20,
            ..S3Options::new(&format!("http://127.0.0.1:{}", self.port), "bucket", "pre/fix")
        }
    }
}

/// Where `cargo xtask roots versitygw` puts it.
fn program() -> Option<PathBuf> {
    let exe = std::env::current_exe().ok()?;
    let target = exe.ancestors().nth(3).map(|target| target.join("roots"));
    let places = std::env::var_os("STERNA_ROOTS").map(PathBuf::from).into_iter().chain(target);
    places.map(|roots| roots.join("versitygw/versitygw")).find(|program| program.exists())
}

/// One test, because it starts the server once.
#[test]
fn versitygw_agrees_with_every_request() {
    let Some(program) = program() else {
        let why = "there is no versitygw: `cargo xtask roots versitygw` builds it";
        let _ = writeln!(std::io::stderr(), "SKIPPED versitygw_agrees_with_every_request: {why}");
        return;
    };
    let gateway = Gateway::start(&program);
    let storage = S3Objects::new(gateway.options("secret")).unwrap();
    small_objects(&storage, &gateway);
    large_objects(&storage, &gateway);
    lists(&storage);
    wrong_secret(&gateway);
    stores(Arc::new(storage));
}

fn small_objects(storage: &S3Objects, gateway: &Gateway) {
    let is_conflict = |done: Result<_, StoreError>| matches!(done, Err(StoreError::Conflict { .. }));
    let first = storage.put("a/x", b"one", Condition::IfAbsent).unwrap();
    assert!(is_conflict(storage.put("a/x", b"two", Condition::IfAbsent)));
    let second = storage.put("a/x", b"two", Condition::IfMatch(&first)).unwrap();
    assert!(is_conflict(storage.put("a/x", b"three", Condition::IfMatch(&first))));
    assert_eq!(storage.get("a/x", 3).unwrap(), (b"two".to_vec(), second));
    assert_eq!(std::fs::read(gateway.directory.path().join("bucket/pre/fix/a/x")).unwrap(), b"two");
    assert!(matches!(storage.get("a/x", 2), Err(StoreError::TooLarge { .. })));
    assert!(matches!(storage.open("none").err(), Some(StoreError::Missing { .. })));
    let blob = storage.open("a/x").unwrap();
    storage.put("a/x", b"new", Condition::Always).unwrap();
    assert!(matches!(blob.read_exact_at(0, &mut [0]), Err(StoreError::Changed { .. })));
    storage.delete("a/x").unwrap();
    storage.delete("a/x").unwrap();
    assert!(matches!(storage.get("a/x", 3), Err(StoreError::Missing { .. })));
}

fn large_objects(storage: &S3Objects, gateway: &Gateway) {
    let content: Vec<u8> = (0..4).flat_map(noise).collect();
    let mut upload = storage.upload("large").unwrap();
    content.chunks(999_999).for_each(|part| upload.write(part).unwrap());
    assert!(matches!(storage.open("large").err(), Some(StoreError::Missing { .. })));
    let tag = upload.complete(Condition::IfAbsent).unwrap();
    assert_eq!(storage.get("large", 1 << 30).unwrap().1, tag);
    let (blob, mut all) = (storage.open("large").unwrap(), vec![0; content.len()]);
    blob.read_exact_at(0, &mut all).unwrap();
    assert!(all == content);

    let mut second = storage.upload("large").unwrap();
    second.write(&content).unwrap();
    assert!(matches!(second.complete(Condition::IfAbsent), Err(StoreError::Conflict { .. })));
    let mut replacing = storage.upload("large").unwrap();
    replacing.write(&content[1..]).unwrap();
    replacing.complete(Condition::Always).unwrap();
    assert!(matches!(blob.read_exact_at(0, &mut [0]), Err(StoreError::Changed { .. })));

    let mut left = storage.upload("left").unwrap();
    left.write(&content).unwrap();
    // As a process that was killed leaves it. The parts that are being sent arrive before the abort.
    std::mem::forget(left);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(storage.abort_uploads(SystemTime::UNIX_EPOCH).unwrap(), 0);
    assert_eq!(storage.abort_uploads(SystemTime::now() + LIMIT).unwrap(), 1);
    assert_eq!(storage.abort_uploads(SystemTime::now() + LIMIT).unwrap(), 0);
    assert!(!gateway.directory.path().join("bucket/pre/fix/left").exists());
    storage.delete("large").unwrap();
}

fn lists(storage: &S3Objects) {
    for number in 0..1100 {
        storage.put(&format!("many/{number:04}"), b"x", Condition::Always).unwrap();
    }
    let mut keys = Vec::new();
    let mut visit = |object: sterna_store::Listed| {
        keys.push(object.key);
        Ok(())
    };
    storage.list("many/", &mut visit).unwrap();
    let wanted: Vec<String> = (0..1100).map(|number| format!("many/{number:04}")).collect();
    assert!(keys == wanted, "{} keys", keys.len());
    keys.iter().for_each(|key| storage.delete(key).unwrap());
}

fn wrong_secret(gateway: &Gateway) {
    let storage = S3Objects::new(gateway.options("another")).unwrap();
    let refused = storage.get("x", 1).unwrap_err();
    assert!(matches!(&refused, StoreError::Remote { status: Some(403), .. }), "{refused}");
}

fn stores(storage: Arc<dyn Objects>) {
    let cache = Arc::new(RangeCache::new(&CacheOptions::default()).unwrap());
    let objects: Arc<dyn Objects> = Arc::new(CachedObjects::new(storage, cache));
    let (first, mut second) = (noise(5), noise(5));
    second[..4096].fill(7);
    let writer = sterna_store::ImageWriter::create_object(
        Arc::clone(&objects),
        "a.sterna",
        blocks(),
        WriteOptions::default(),
    );
    fill(writer.unwrap(), &first).unwrap();
    assert_has(&open(&objects, "a.sterna").unwrap(), &first);
    let store = ImageStore::new(Arc::clone(&objects), None);
    for (name, ram) in [("one", &first), ("two", &second)] {
        fill(store.writer(name, blocks(), WriteOptions::default()).unwrap(), ram).unwrap();
    }
    assert_has(&store.image("two").unwrap(), &second);
    store.remove("one").unwrap();
    assert_eq!(store.collect().unwrap().images, 1);
    assert_has(&store.image("two").unwrap(), &second);
    store.remove("two").unwrap();
    assert_eq!(store.collect().unwrap().packs, 2);
    let mut keys = Vec::new();
    let mut visit = |object: sterna_store::Listed| {
        keys.push(object.key);
        Ok(())
    };
    objects.list("", &mut visit).unwrap();
    assert_eq!(keys, ["a.sterna"]);
}
