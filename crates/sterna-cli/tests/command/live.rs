//! `sterna save --live`, `sterna snapshot` and `sterna fork` with Sterna's own VMM, as users run them.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_drive::Vm;
use sterna_qmp::Endpoint;

use crate::object_storage::set;
use crate::s3_server::Server;
use crate::save::Process;

const LIMIT: Duration = Duration::from_secs(120);

fn sterna(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sterna")).args(arguments).output().unwrap()
}

fn done(arguments: &[&str]) -> String {
    let output = sterna(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

fn told(arguments: &[&str]) -> Value {
    let text = done(arguments);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn assert_consistent(vm: &mut Vm) {
    let checked = vm.execute("x-sterna-check-guest", Value::Null).unwrap();
    assert_eq!(checked["consistent"], json!(true), "{checked}");
    assert_eq!(vm.run_state().unwrap(), "running");
}

/// The image is sound, and a guest that is restored from it is consistent and runs.
fn assert_restores(image: &str, directory: &Path) {
    done(&["verify", image]);
    let (plain, socket) = (directory.join("plain.img"), directory.join("restored.qmp"));
    let target = Process::start(socket, &["--incoming", "defer"]);
    done(&["convert", image, plain.to_str().unwrap(), "--format", "mapped-ram"]);
    done(&["restore", plain.to_str().unwrap(), &target.socket()]);
    std::fs::remove_file(plain).unwrap();
    assert_consistent(&mut target.vm());
}

fn count(directory: &Path, part: &str) -> usize {
    let names = std::fs::read_dir(directory).unwrap().flatten();
    names.filter(|name| name.file_name().to_string_lossy().contains(part)).count()
}

#[test]
fn live_save_leaves_the_guest_running_and_its_image_restores() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("a.sterna");
    let image = image.to_str().unwrap();
    let source = Process::start(directory.path().join("a.qmp"), &[]);

    let saved = told(&["save", "--live", &source.socket(), image, "--json"]);

    assert_eq!((&saved["live"], &saved["format"]), (&json!(true), &json!("sterna")));
    assert!(saved["pause"].as_f64().unwrap() > 0.0, "{saved}");
    assert_consistent(&mut source.vm());
    let refused = sterna(&["save", "--live", &source.socket(), image]);
    assert!(!refused.status.success(), "an image is replaced only with --force");
    let refused = sterna(&["save", "--live", &source.socket(), image, "--force", "--format", "legacy"]);
    assert_eq!(refused.status.code(), Some(2));
    done(&["save", "--live", &source.socket(), image, "--force"]);
    assert_eq!(count(directory.path(), "sterna"), 1, "nothing is left aside");
    assert_restores(image, directory.path());
}

#[test]
fn killed_live_save_leaves_no_image_and_a_guest_that_can_be_saved_again() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("a.sterna");
    let source = Process::start(directory.path().join("a.qmp"), &[]);
    // A level that is much slower than the guest.
    let mut save = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args([
            "save",
            "--live",
            &source.socket(),
            image.to_str().unwrap(),
            "--level",
            "22",
            "--extent",
            "2M",
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut vm = source.vm();
    let began = Instant::now();
    while vm.execute("x-sterna-query-live-save", Value::Null).unwrap()["pause"].is_null() {
        assert!(began.elapsed() < LIMIT && save.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(1));
    }
    save.kill().unwrap();
    save.wait().unwrap();

    while !vm.progress().unwrap().is_over() {
        assert!(began.elapsed() < LIMIT, "the VM has not noticed");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!image.exists());
    assert_consistent(&mut vm);
    let told = vm.execute("x-sterna-query-live-save", Value::Null).unwrap();
    assert_eq!(told["status"], "failed", "{told}");
    done(&["save", "--live", &source.socket(), image.to_str().unwrap()]);
    assert_restores(image.to_str().unwrap(), directory.path());
}

#[test]
fn monitor_refuses_a_second_save_a_migration_and_changes_that_no_one_can_use() {
    let directory = tempfile::tempdir().unwrap();
    let source = Process::start(directory.path().join("a.qmp"), &[]);
    let mut vm = source.vm();
    let file = |name: &str| format!("file:{}", directory.path().join(name).display());
    let refusal = |vm: &mut Vm, command: &str, arguments: Value| {
        vm.execute(command, arguments).unwrap_err().to_string()
    };

    let changes = json!({ "uri": file("a"), "track": true, "since": 1 });
    assert!(refusal(&mut vm, "x-sterna-live-save", changes).contains("is no whole guest"));
    assert_eq!(vm.execute("x-sterna-query-live-save", Value::Null).unwrap(), json!({}));
    // So slow that it does not end by itself.
    vm.execute("x-sterna-live-save", json!({ "uri": file("a"), "max-bandwidth": 1 << 20 })).unwrap();
    for command in ["migrate", "x-sterna-live-save"] {
        let said = refusal(&mut vm, command, json!({ "uri": file("b") }));
        assert!(said.contains("There's a migration process in progress"), "{said}");
    }
    vm.execute("migrate_cancel", Value::Null).unwrap();
    let began = Instant::now();
    while !vm.progress().unwrap().is_over() {
        assert!(began.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(vm.progress().unwrap().status, "cancelled");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().flatten().count(), 1, "only the monitor is left");
    assert_consistent(&mut vm);
}

#[test]
fn snapshots_hold_what_changed_and_old_ones_are_removed() {
    let directory = tempfile::tempdir().unwrap();
    let store = format!("store:{}", directory.path().join("store").display());
    let load = ["--rate", "500", "--working-set", "1M"];
    let source = Process::start(directory.path().join("a.qmp"), &load);

    let every = ["--every", "200ms", "--count", "5", "--keep", "3", "--json"];
    let socket = source.socket();
    let text = done(&[&["snapshot", socket.as_str(), store.as_str()][..], &every[..]].concat());

    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 5, "{text}");
    let of = |member: &str| lines.iter().map(|line| line[member].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(of("layers"), [1, 2, 3, 4, 5]);
    assert_eq!(of("pages")[0], 64 << 20 >> 12);
    for (pages, bytes) in of("pages").iter().zip(of("file_bytes")).skip(1) {
        assert!((1..=1024).contains(pages), "{text}");
        assert!(bytes < of("file_bytes")[0] / 10, "{text}");
    }
    let listed = told(&["store", "ls", &store, "--json"]);
    let names: Vec<_> = listed["images"].as_array().unwrap().iter().map(|image| &image["name"]).collect();
    assert_eq!(names.len(), 3, "{listed}");
    let checked = told(&["store", "check", &store, "--json"]);
    assert_eq!(checked["sound"], json!(true), "{checked}");
    assert_consistent(&mut source.vm());
    for line in &lines[2..] {
        assert_restores(line["image"].as_str().unwrap(), directory.path());
    }

    // Another command begins with a whole image, and a migration in between is not refused.
    let text = done(&["snapshot", &socket, &store, "--json"]);
    let line: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(line["layers"], 1);
    done(&["save", &socket, directory.path().join("plain.img").to_str().unwrap(), "--resume-after"]);
    assert_consistent(&mut source.vm());
}

#[test]
fn snapshot_that_cannot_begin_makes_no_store() {
    let directory = tempfile::tempdir().unwrap();
    let (monitor, place) = (directory.path().join("none.qmp"), directory.path().join("store"));
    let store = format!("store:{}", place.display());
    let cases = [
        (store.clone(), "none.qmp"),
        (format!("{store}#a/b"), "is not a name"),
        (place.display().to_string(), "is no store"),
        ("s3://bucket/web1.sterna".to_owned(), "none.qmp"),
    ];

    for (store, wanted) in cases {
        let output = sterna(&["snapshot", monitor.to_str().unwrap(), &store]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(wanted), "{store}: {said}");
        assert!(!place.exists(), "{store}");
    }
}

#[test]
fn snapshots_go_to_a_store_in_an_object_storage() {
    let (directory, server) = (tempfile::tempdir().unwrap(), Server::start());
    let load = ["--rate", "500", "--working-set", "1M"];
    let source = Process::start(directory.path().join("a.qmp"), &load);
    let done = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        set(&mut command, &server);
        let output = command.args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let store = "s3://bucket/guests";

    let every = ["--every", "200ms", "--count", "4", "--keep", "2", "--json"];
    let prefixed = format!("{store}#web1");
    let text = done(&[&["snapshot", source.socket().as_str(), &prefixed][..], &every[..]].concat());

    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let images: Vec<_> = lines.iter().map(|line| line["image"].as_str().unwrap()).collect();
    assert_eq!(images.len(), 4, "{text}");
    let listed: Value = serde_json::from_str(&done(&["store", "ls", store, "--json"])).unwrap();
    let names = listed["images"].as_array().unwrap().iter();
    let names: Vec<_> = names.map(|image| format!("{store}#{}", image["name"].as_str().unwrap())).collect();
    assert_eq!(names, images[2..], "{listed}");
    done(&["store", "check", store]);
    let plain = directory.path().join("plain.img");
    done(&["convert", images[3], plain.to_str().unwrap(), "--format", "mapped-ram"]);
    let target = Process::start(directory.path().join("restored.qmp"), &["--incoming", "defer"]);
    done(&["restore", plain.to_str().unwrap(), &target.socket()]);
    assert_consistent(&mut target.vm());
}

#[test]
fn fork_runs_a_copy_and_the_guest_runs_on() {
    let directory = tempfile::tempdir().unwrap();
    let source = Process::start(directory.path().join("a.qmp"), &[]);
    let program = env!("CARGO_BIN_EXE_sterna");
    let command = ["--", program, "run", "--machine=process", "--ram=64M"];

    let forked = told(&[&["fork", source.socket().as_str(), "--json"][..], &command[..]].concat());

    assert_eq!(forked["is_running"], json!(true));
    let socket = forked["monitor"].as_str().unwrap().to_owned();
    let mut copy = Vm::connect(&Endpoint::Unix(socket.clone().into())).unwrap();
    assert_consistent(&mut copy);
    assert_consistent(&mut source.vm());
    copy.execute("quit", Value::Null).unwrap();

    // A VM of another size refuses the copy.
    let command = ["--", program, "run", "--machine=process", "--ram=32M"];
    let refused = sterna(&[&["fork", source.socket().as_str()][..], &command[..]].concat());
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("the guest runs as before"), "{said}");
    assert_consistent(&mut source.vm());
    std::fs::remove_dir_all(Path::new(&socket).parent().unwrap()).unwrap();
}
