//! `sterna serve IMAGE uffd:SOCKET`, with guests in other processes that have a real userfaultfd.

#![allow(clippy::print_stderr, reason = "a test that cannot run says why")]

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use sterna_image::{Key, PageRange, StoredImage};
use sterna_uffd_peer::{Peer, memory, sum};

const BYTES: u64 = 4 << 20;

/// The other process of these tests.
#[test]
#[ignore = "it is the guest of other tests"]
fn guest_process() {
    sterna_uffd_peer::child();
}

pub(crate) fn guest(test: &str) -> Option<Peer> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "serve_uffd::guest_process", "--ignored", "--nocapture"]);
    let mut peer = Peer::start(&mut command).unwrap();
    match peer.map(4096, &[BYTES]) {
        Ok(()) => Some(peer),
        Err(why) => {
            eprintln!("SKIPPED {test}: userfaultfd: {why}");
            None
        }
    }
}

/// The command, which is killed on drop.
pub(crate) struct Served(Child);

impl Served {
    /// Waits for its end. Returns the exit status and the standard output.
    pub(crate) fn end(mut self) -> (Option<i32>, String) {
        let mut said = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        (self.0.wait().unwrap().code(), said)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Errors mean that it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the command, and waits until it listens.
fn serve(image: &Path, address: &Path, more: &[&str]) -> Served {
    serve_with(image, address, more, &|_| ())
}

/// Like [`serve`], with an environment that `set` changes.
pub(crate) fn serve_with(image: &Path, address: &Path, more: &[&str], set: &dyn Fn(&mut Command)) -> Served {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    set(&mut command);
    command.arg("serve").arg(image).arg(format!("uffd:{}", address.display())).args(more);
    let mut served = Served(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    let mut errors = BufReader::new(served.0.stderr.take().unwrap());
    errors.read_line(&mut line).unwrap();
    assert!(line.contains("listening at"), "{line}");
    // The rest is read, so that the command is never blocked.
    std::thread::spawn(move || errors.lines().for_each(drop));
    served
}

#[test]
fn guests_are_served_until_each_has_all_of_its_memory() {
    let name = "guests_are_served_until_each_has_all_of_its_memory";
    let directory = tempfile::tempdir().unwrap();
    let (image, content) = (directory.path().join("memory"), memory(BYTES));
    std::fs::write(&image, &content).unwrap();
    let more = ["--guests", "2", "--json", "--fill-rate", "max"];
    let served = serve(&image, &directory.path().join("%i.sock"), &more);
    for number in 0..2 {
        let Some(mut guest) = guest(name) else { return };
        guest.hand_over(&directory.path().join(format!("{number}.sock")), "whole").unwrap();
        assert_eq!(guest.sum(0, BYTES), Ok(sum(&content)));
        if number == 1 {
            let (status, report) = served.end();
            assert_eq!(status, Some(0));
            let report: Value = serde_json::from_str(&report).unwrap();
            assert_eq!(report["guests"].as_array().unwrap().len(), 2);
            assert_eq!(report["guests"][1]["end"], "completed");
            assert_eq!(guest.sum(0, BYTES), Ok(sum(&content)), "without the command");
            return;
        }
    }
}

#[test]
fn recorded_pages_are_written_when_the_command_ends() {
    let directory = tempfile::tempdir().unwrap();
    let (image, recorded) = (directory.path().join("memory"), directory.path().join("touched"));
    std::fs::write(&image, memory(BYTES)).unwrap();
    let socket = directory.path().join("sock");
    let record = recorded.display().to_string();
    let served = serve(&image, &socket, &["--record", &record]);
    let Some(mut guest) = guest("recorded_pages_are_written_when_the_command_ends") else { return };
    guest.hand_over(&socket, "whole").unwrap();
    guest.sum(1 << 20, 8192).unwrap();
    guest.kill();

    assert_eq!(served.end().0, Some(0));
    let text = std::fs::read_to_string(&recorded).unwrap();
    assert_eq!(text, "sterna-working-set 1\nmemory 4194304\n1048576 8192\n");
}

/// `pager images::` checks that the next guest gets them first.
#[test]
fn touched_pages_are_stored_in_the_image() {
    let name = "touched_pages_are_stored_in_the_image";
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| directory.path().join(name);
    let (snapshot, image, key) = (place("snapshot"), place("image.sterna"), place("key"));
    std::fs::create_dir(&snapshot).unwrap();
    std::fs::write(snapshot.join("memory"), memory(BYTES)).unwrap();
    std::fs::write(snapshot.join("vmstate"), b"state").unwrap();
    std::fs::write(&key, [4; 32]).unwrap();
    let sterna = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_sterna")).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    };
    let (at, with) = (image.to_str().unwrap(), ["--key", key.to_str().unwrap()]);
    sterna(&["convert", snapshot.to_str().unwrap(), at, with[0], with[1]]);

    let served = serve(&image, &place("a"), &[&with[..], &["--record"]].concat());
    let Some(mut first) = guest(name) else { return };
    first.hand_over(&place("a"), "whole").unwrap();
    // One page: the others of its frame are placed with it, and are recorded only if the guest is faster.
    first.sum(2 << 20, 4096).unwrap();
    first.kill();
    assert_eq!(served.end().0, Some(0));
    sterna(&["verify", at, with[0], with[1]]);

    let stored = StoredImage::open(&image, Some(&Key::new([4; 32]))).unwrap();
    assert_eq!(stored.working_set(), [PageRange { block: 0, count: 1, first: 512 }]);
    // A raw file has no room for them.
    let raw = snapshot.join("memory");
    let mut refused = Command::new(env!("CARGO_BIN_EXE_sterna"));
    let refused = refused.arg("serve").arg(raw).args(["uffd:/nothing/socket", "--record"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no room"), "{refused:?}");
}

/// A command that is asked to end kills guests that would hang.
#[test]
fn guest_that_lacks_pages_is_killed_when_the_command_is_terminated() {
    let directory = tempfile::tempdir().unwrap();
    let (image, socket) = (directory.path().join("memory"), directory.path().join("sock"));
    std::fs::write(&image, memory(BYTES)).unwrap();
    let served = serve(&image, &socket, &["--fill-rate", "off"]);
    let Some(mut guest) = guest("guest_that_lacks_pages_is_killed_when_the_command_is_terminated") else {
        return;
    };
    guest.hand_over(&socket, "whole").unwrap();
    guest.sum(0, 4096).unwrap();

    let pid = rustix::process::Pid::from_raw(served.0.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();

    assert_eq!(guest.wait().unwrap().signal(), Some(9));
    assert_eq!(served.end().0, Some(130));
    assert!(!socket.exists());
}

#[test]
fn options_of_the_other_protocol_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("memory");
    std::fs::write(&image, memory(BYTES)).unwrap();
    let refused = |arguments: &[&str]| {
        let command =
            Command::new(env!("CARGO_BIN_EXE_sterna")).arg("serve").arg(&image).args(arguments).output();
        let output = command.unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };

    assert!(refused(&["uffd:/s", "--preempt"]).contains("--preempt is not for uffd:"));
    assert!(refused(&["uffd:/s", "unix:/t"]).contains("cannot be combined"));
    assert!(refused(&["unix:/t", "--fill-rate", "off"]).contains("--fill-rate is only for uffd:"));
    assert!(refused(&["uffd:/s", "--working-set", "/nonexistent"]).contains("cannot read"));
}
