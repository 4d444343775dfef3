//! Saves, snapshots, forks and the end of a guest that was restored before its memory was loaded, and still lacks pages.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sterna_drive::Vm;
use sterna_qmp::Endpoint;

use crate::object_storage::set;
use crate::run_restore::{LIMIT, Machine, damage, done, ended, image, kinds, sterna, text};
use crate::s3_server::Server;

/// Nothing is loaded that the guest does not touch.
const OFF: [&str; 2] = ["--lazy", "--fill-rate=off"];

fn missing(machine: &Machine) -> u64 {
    machine.ask("x-sterna-query-restore", Value::Null)["missing-pages"].as_u64().unwrap()
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: never");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The guest in `image` is whole and runs.
fn assert_restores(directory: &Path, kind: &str, image: &Path) {
    let copy = Machine::restored(directory, "copy", kind, image, &[]);
    assert_eq!(copy.ask("query-status", Value::Null)["status"], "running");
    copy.check();
}

/// The guest has all of its memory, and runs.
fn assert_whole(lazy: &Machine) {
    lazy.until("memory is complete", |restore| restore["status"] == "completed");
    assert_eq!(lazy.ask("query-status", Value::Null)["status"], "running");
    lazy.check();
}

#[test]
fn live_save_of_a_guest_that_lacks_pages_has_all_of_them() {
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let first = image(directory.path(), kind, "vm.sterna");
        for (number, rate) in ["off", "64KiB/s", "max"].into_iter().enumerate() {
            let rate = format!("--fill-rate={rate}");
            let lazy = Machine::restored(directory.path(), "lazy", kind, &first, &["--lazy", &rate]);
            let socket = lazy.socket.to_str().unwrap();
            let second = directory.path().join(format!("live-{number}.sterna"));

            let saved = sterna(&["save", "--live", socket, second.to_str().unwrap()]);

            done(&saved);
            assert_whole(&lazy);
            assert_restores(directory.path(), kind, &second);
        }
    }
}

#[test]
fn snapshots_of_a_guest_that_lacks_pages_are_a_whole_image_and_layers() {
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let first = image(directory.path(), kind, "vm.sterna");
        let lazy = Machine::restored(directory.path(), "lazy", kind, &first, &OFF);
        let store = format!("store:{}", directory.path().join("store").display());
        let socket = lazy.socket.to_str().unwrap();

        let taken = sterna(&["snapshot", socket, &store, "--every=100ms", "--count=3", "--json"]);

        done(&taken);
        let images: Vec<Value> =
            text(&taken.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let layers: Vec<_> = images.iter().map(|image| image["layers"].as_u64().unwrap()).collect();
        assert_eq!(layers, [1, 2, 3], "{images:?}");
        assert_eq!(images[0]["pages"].as_u64(), Some((64 << 20) / 4096), "{images:?}");
        done(&sterna(&["store", "check", &store]));
        assert_whole(&lazy);
        for image in images {
            assert_restores(directory.path(), kind, Path::new(image["image"].as_str().unwrap()));
        }
    }
}

#[test]
fn fork_of_a_guest_that_lacks_pages_has_all_of_them() {
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let first = image(directory.path(), kind, "vm.sterna");
        let lazy = Machine::restored(directory.path(), "lazy", kind, &first, &OFF);
        let machine = format!("--machine={kind}");
        let socket = lazy.socket.to_str().unwrap();
        let program = env!("CARGO_BIN_EXE_sterna");

        // The checker of the copy takes the fill from its own command line.
        let run = ["--", program, "run", &machine, "--ram=64M", "--fill=half", "--rate=2000"];
        let forked = sterna(&[&["fork", socket, "--json"], &run[..]].concat());

        done(&forked);
        let forked: Value = serde_json::from_slice(&forked.stdout).unwrap();
        let socket = PathBuf::from(forked["monitor"].as_str().unwrap());
        let mut copy = Vm::connect(&Endpoint::Unix(socket.clone())).unwrap();
        let checked = copy.execute("x-sterna-check-guest", Value::Null).unwrap();
        assert_eq!(checked["consistent"], json!(true), "{checked}");
        assert_whole(&lazy);
        copy.execute("quit", Value::Null).unwrap();
        fs::remove_dir_all(socket.parent().unwrap()).unwrap();
    }
}

#[test]
fn save_that_stops_the_guest_loads_its_memory_before_the_stop() {
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let first = image(directory.path(), kind, "vm.sterna");
        for name in ["again.sterna", "again.img"] {
            let lazy = Machine::restored(directory.path(), "lazy", kind, &first, &OFF);
            let second = directory.path().join(name);

            let saved =
                sterna(&["save", lazy.socket.to_str().unwrap(), second.to_str().unwrap(), "--resume-after"]);

            done(&saved);
            assert!(text(&saved.stderr).contains("are loaded first"), "{}", text(&saved.stderr));
            assert_whole(&lazy);
            assert_restores(directory.path(), kind, &second);
        }
    }
}

#[test]
fn damaged_frame_fails_the_operation_by_its_name_and_the_guest_stays_as_it_was() {
    for kind in kinds() {
        let directory = tempfile::tempdir().unwrap();
        let image = image(directory.path(), kind, "vm.sterna");
        damage(&image);
        // A guest that runs would touch such a page.
        let lazy = Machine::restored(directory.path(), "lazy", kind, &image, &[&OFF[..], &["-S"]].concat());
        let socket = lazy.socket.to_str().unwrap();
        let second = directory.path().join("second.sterna");
        let second = second.to_str().unwrap();
        let store = format!("store:{}", directory.path().join("store").display());
        let migrate = format!("unix:{}", directory.path().join("nowhere").display());
        let (program, machine) = (env!("CARGO_BIN_EXE_sterna"), format!("--machine={kind}"));

        for _ in 0..2 {
            for line in [
                vec!["save", "--live", socket, second],
                vec!["save", socket, second],
                vec!["snapshot", socket, &store],
                vec!["migrate", socket, &migrate],
                vec!["fork", socket, "--", program, "run", &machine, "--ram=64M"],
            ] {
                let failed = sterna(&line);
                let said = text(&failed.stderr);
                assert_eq!(failed.status.code(), Some(1), "{line:?}: {said}");
                for word in ["page at byte", "frame ", "vm.sterna"] {
                    assert!(said.contains(word), "{line:?}: {said}");
                }
            }
        }

        assert!(!Path::new(second).exists());
        let restore = lazy.ask("x-sterna-query-restore", Value::Null);
        assert_eq!(restore["status"], "active", "{restore}");
        assert!(missing(&lazy) > 0);
        assert_eq!(lazy.ask("query-status", Value::Null)["running"], json!(false));
    }
}

/// A paused guest whose image is in an object storage.
fn in_bucket(server: &Server, directory: &Path) -> Machine {
    let plain = image(directory, "process", "vm.sterna");
    let object = "s3://bucket/vm.sterna";
    let mut convert = Command::new(env!("CARGO_BIN_EXE_sterna"));
    set(&mut convert, server);
    done(&convert.args(["convert", plain.to_str().unwrap(), object]).output().unwrap());
    let restore = format!("--restore={object}");
    let line = [restore.as_str(), OFF[0], OFF[1], "-S"];
    let lazy = Machine::start_with(directory, "lazy", "process", &line, &|command| set(command, server));
    lazy.until("the guest can run", |restore| restore["start-time"].is_number());
    assert!(missing(&lazy) > 1000);
    lazy
}

fn begin(line: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.args(line).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The operation waits for a storage that does not answer.
fn await_loading(lazy: &Machine, server: &Server, requests: usize) {
    eventually("a page is requested", || server.requests() > requests);
    assert!(missing(lazy) > 0);
}

#[test]
fn operation_that_waits_for_pages_is_cancelled_or_killed_and_the_next_one_succeeds() {
    let (server, directory) = (Server::start(), tempfile::tempdir().unwrap());
    let lazy = in_bucket(&server, directory.path());
    let socket = lazy.socket.to_str().unwrap();
    let second = directory.path().join("second.sterna");
    let live = ["save", "--live", socket, second.to_str().unwrap()];
    let stopping = ["save", socket, second.to_str().unwrap()];

    server.state.lock().unwrap().delay = Duration::from_millis(300);
    for line in [&live[..], &stopping[..]] {
        for signal in [Signal::INT, Signal::KILL] {
            let before = server.requests();
            let mut command = begin(line);
            await_loading(&lazy, &server, before);
            kill_process(Pid::from_child(&command), signal).unwrap();
            let status = command.wait().unwrap();
            match signal {
                Signal::KILL => assert_eq!(status.signal(), Some(9)),
                _ => assert_eq!(status.code(), Some(130), "{line:?}"),
            }
            // The read that has begun ends, and no other follows.
            eventually("the VM ends the operation", || {
                let migration = lazy.ask("query-migrate", Value::Null);
                matches!(migration["status"].as_str(), None | Some("cancelled" | "failed"))
            });
            eventually("the fill rests", || {
                let requests = server.requests();
                std::thread::sleep(Duration::from_millis(1500));
                server.requests() == requests
            });
            assert!(missing(&lazy) > 0 && !second.exists(), "{line:?} {signal:?}");
            assert_eq!(lazy.ask("query-status", Value::Null)["running"], json!(false));
        }
    }

    server.state.lock().unwrap().delay = Duration::ZERO;
    done(&sterna(&live));
    lazy.until("memory is complete", |restore| restore["status"] == "completed");
    done(&sterna(&["verify", second.to_str().unwrap()]));
}

#[test]
fn vm_that_ends_while_an_operation_waits_for_pages_ends_without_the_image() {
    for signal in [None, Some(Signal::TERM), Some(Signal::INT)] {
        let (server, directory) = (Server::start(), tempfile::tempdir().unwrap());
        let mut lazy = in_bucket(&server, directory.path());
        let second = directory.path().join("second.sterna");
        let line = ["save", "--live", lazy.socket.to_str().unwrap(), second.to_str().unwrap()];
        // The storage answers nothing any more.
        let silence = server.state.lock().unwrap();
        let mut command = begin(&line);
        eventually("the save waits", || {
            let migration = lazy.ask("query-migrate", Value::Null);
            migration["status"] == "setup" && migration["x-sterna-missing-bytes"].as_u64() > Some(0)
        });

        match signal {
            None => drop(lazy.ask("quit", Value::Null)),
            Some(signal) => kill_process(Pid::from_child(&lazy.child), signal).unwrap(),
        }

        assert_eq!(ended(&mut lazy.child), Some(0), "{signal:?}: {}", lazy.log());
        assert!(!command.wait().unwrap().success());
        assert!(!second.exists());
        drop(silence);
    }
}
