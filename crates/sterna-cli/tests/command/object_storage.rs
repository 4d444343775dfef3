//! Images in an object storage as users name them: `s3://BUCKET/KEY.sterna` and `s3://BUCKET/PREFIX#NAME`.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::convert::whole;
use crate::s3_server::{Fault, KEY, SECRET, Server};
use crate::serve_uffd::{guest, serve_with};

const LIMIT: Duration = Duration::from_secs(60);

fn sterna(server: &Server) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    set(&mut command, server);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Lets the command use the test's storage.
pub(crate) fn set(command: &mut Command, server: &Server) {
    command.env("AWS_ENDPOINT_URL", server.endpoint());
    command.env("AWS_ACCESS_KEY_ID", KEY).env("AWS_SECRET_ACCESS_KEY", SECRET);
    for name in
        ["AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE"]
    {
        command.env_remove(name);
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs the command, which must succeed. Returns its standard output.
fn run(server: &Server, line: &[&str]) -> Vec<u8> {
    let output = sterna(server).args(line).output().unwrap();
    assert!(output.status.success(), "{line:?}: {}", said(&output));
    output.stdout
}

/// Runs the command, which must fail with this status. Returns its standard error.
fn refused(server: &Server, status: i32, line: &[&str]) -> String {
    let output = sterna(server).args(line).output().unwrap();
    assert_eq!(output.status.code(), Some(status), "{line:?}: {}", said(&output));
    said(&output)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A snapshot of Firecracker: so much noise that its upload has several parts.
fn snapshot(directory: &Path, bytes: usize) -> std::path::PathBuf {
    let from = directory.join("snapshot");
    fs::create_dir(&from).unwrap();
    let mut rng = fastrand::Rng::with_seed(1);
    let memory: Vec<u8> = (0..bytes).map(|_| rng.u8(..)).collect();
    fs::write(from.join("memory"), memory).unwrap();
    fs::write(from.join("state"), b"the devices").unwrap();
    from
}

#[test]
fn image_of_qemu_goes_to_an_object_and_comes_back_byte_for_byte() {
    let (server, directory) = (Server::start(), tempfile::tempdir().unwrap());
    let source = directory.path().join("source");
    fs::write(&source, whole()).unwrap();
    let object = "s3://bucket/some/where/web1.sterna";
    run(&server, &["convert", text(&source), object]);
    assert!(server.state.lock().unwrap().objects.contains_key("some/where/web1.sterna"));

    run(&server, &["verify", object]);
    run(&server, &["diff", text(&source), object]);
    let seen: Value = serde_json::from_slice(&run(&server, &["inspect", object, "--json"])).unwrap();
    assert_eq!(seen["blocks"][0]["name"], "m");
    let core = directory.path().join("block");
    run(&server, &["extract", object, text(&core), "--block", "m"]);
    assert_eq!(fs::metadata(&core).unwrap().len(), 4096);
    assert!(run(&server, &["convert", object, "-"]) == whole());

    let exists = refused(&server, 2, &["convert", text(&source), object]);
    assert!(exists.contains(object) && exists.contains("exists"), "{exists}");
    run(&server, &["convert", text(&source), object, "--force"]);
    assert!(server.state.lock().unwrap().uploads.is_empty());
}

#[test]
fn snapshot_goes_to_a_store_in_a_bucket_and_comes_back_byte_for_byte() {
    let (server, directory) = (Server::start(), tempfile::tempdir().unwrap());
    let from = snapshot(directory.path(), 17 << 20);
    let (store, image) = ("s3://bucket/store", "s3://bucket/store#agent");
    run(&server, &["convert", text(&from), "s3://bucket/agent.sterna", "--level", "0"]);
    run(&server, &["convert", "s3://bucket/agent.sterna", image]);
    run(&server, &["verify", image]);
    let back = directory.path().join("back");
    run(&server, &["convert", image, text(&back)]);
    for name in ["memory", "state"] {
        assert!(fs::read(from.join(name)).unwrap() == fs::read(back.join(name)).unwrap(), "{name}");
    }

    // A second image of the same memory takes no room for frames.
    run(&server, &["flatten", image, "--output", "s3://bucket/store#copy"]);
    let stat: Value = serde_json::from_slice(&run(&server, &["store", "stat", store, "--json"])).unwrap();
    assert_eq!((&stat["names"], &stat["leases"]), (&2.into(), &0.into()));
    assert!(stat["pack_bytes"].as_u64().unwrap() < 18 << 20, "{stat}");
    let listed = String::from_utf8(run(&server, &["store", "ls", store])).unwrap();
    assert!(listed.contains("agent") && listed.contains("copy"), "{listed}");
    run(&server, &["store", "check", store]);
    run(&server, &["store", "rm", image, "s3://bucket/store#copy"]);
    run(&server, &["store", "gc", store]);
    let left: Vec<String> = server.state.lock().unwrap().objects.keys().cloned().collect();
    assert_eq!(left, ["agent.sterna"]);
}

#[test]
fn addresses_and_servers_that_are_wrong_are_refused_with_their_reason() {
    let (server, directory) = (Server::start(), tempfile::tempdir().unwrap());
    let source = directory.path().join("source");
    fs::write(&source, whole()).unwrap();
    let object = "s3://bucket/a.sterna";

    let unnamed = refused(&server, 2, &["convert", text(&source), "s3://bucket/store"]);
    assert!(unnamed.contains("#NAME") && unnamed.contains("KEY.sterna"), "{unnamed}");
    assert!(refused(&server, 2, &["verify", object]).contains("no such file or object"));
    assert!(refused(&server, 2, &["verify", "s3://other/a.sterna"]).contains("s3://other/a.sterna"));
    run(&server, &["convert", text(&source), object]);

    let wrong = r#"printf '{"AccessKeyId":"access","SecretAccessKey":"other"}'"#;
    let denied = refused(&server, 2, &["verify", object, "--s3-credentials-command", wrong]);
    assert!(
        denied.contains("403") && denied.contains("credentials") && !denied.contains("other"),
        "{denied}"
    );
    let nowhere = ["verify", object, "--s3-endpoint", "http://127.0.0.1:1"];
    assert!(refused(&server, 2, &nowhere).contains(object));
    let no_authority = ["verify", object, "--s3-endpoint", "https://127.0.0.1:1", "--s3-ca", text(&source)];
    assert!(refused(&server, 2, &no_authority).contains("certificate"));
    server.fail(&[Fault::Status(503), Fault::WrongRange, Fault::CloseEarly]);
    run(&server, &["verify", object]);
}

#[test]
fn directory_of_the_cache_spares_requests_and_its_damage_is_no_error() {
    let (server, directory) = (Server::start(), tempfile::tempdir().unwrap());
    let from = snapshot(directory.path(), 2 << 20);
    run(&server, &["convert", text(&from), "s3://bucket/a.sterna"]);
    let cache = directory.path().join("cache");
    let verify = ["verify", "s3://bucket/a.sterna", "--cache", text(&cache), "--cache-size", "16M"];
    let requests = || {
        let before = server.requests();
        run(&server, &verify);
        server.requests() - before
    };
    let (cold, warm) = (requests(), requests());
    assert!(cold > 4 && warm == 1, "{cold}, then {warm}");

    for parent in fs::read_dir(&cache).unwrap().flatten().filter(|entry| entry.path().is_dir()) {
        for file in fs::read_dir(parent.path()).unwrap().flatten() {
            fs::write(file.path(), b"damage").unwrap();
        }
    }
    assert!(requests() > 4);
    assert!(refused(&server, 2, &["verify", "a", "--cache-size", "1M"]).contains("at least"));
}

#[test]
fn upload_that_is_told_to_end_leaves_neither_object_nor_upload() {
    let (server, directory) = (Server::start(), tempfile::tempdir().unwrap());
    let from = snapshot(directory.path(), 40 << 20);
    server.state.lock().unwrap().delay = Duration::from_millis(300);
    let mut convert = sterna(&server);
    let mut convert =
        convert.args(["convert", text(&from), "s3://bucket/a.sterna", "--level", "0"]).spawn().unwrap();
    let deadline = Instant::now() + LIMIT;
    while server.state.lock().unwrap().uploads.is_empty() {
        assert!(Instant::now() < deadline, "no upload began");
        std::thread::sleep(Duration::from_millis(5));
    }

    let process = rustix::process::Pid::from_child(&convert);
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();

    assert_eq!(convert.wait().unwrap().code(), Some(130));
    let state = server.state.lock().unwrap();
    assert!(state.uploads.is_empty() && state.objects.is_empty());
}

/// A guest of Firecracker gets its memory from a bucket.
#[test]
fn guest_is_served_from_an_object() {
    let name = "guest_is_served_from_an_object";
    let (server, directory) = (Server::start(), tempfile::tempdir().unwrap());
    let from = directory.path().join("snapshot");
    fs::create_dir(&from).unwrap();
    let content = sterna_uffd_peer::memory(4 << 20);
    fs::write(from.join("memory"), &content).unwrap();
    fs::write(from.join("state"), b"the devices").unwrap();
    run(&server, &["convert", text(&from), "s3://bucket/agent.sterna"]);
    let socket = directory.path().join("sock");
    let image = Path::new("s3://bucket/agent.sterna");
    let served =
        serve_with(image, &socket, &["--json", "--fill-rate", "max"], &|command| set(command, &server));
    let Some(mut guest) = guest(name) else { return };
    guest.hand_over(&socket, "whole").unwrap();

    assert_eq!(guest.sum(0, 4 << 20), Ok(sterna_uffd_peer::sum(&content)));
    let (status, report) = served.end();
    assert_eq!(status, Some(0));
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["guests"][0]["end"], "completed");
}
