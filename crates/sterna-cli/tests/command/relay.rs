//! `sterna relay` as two processes over loopback: bytes, TLS, refusals, signals; its control, its figures, and systemd.

mod control;
mod guest;
mod service;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::certificates;

const PATIENCE: Duration = Duration::from_secs(60);

fn sterna(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.arg("relay").args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// A relay that listens. It is killed on drop.
struct Relay {
    process: Child,
    address: String,
    metrics: Option<u16>,
    lines: BufReader<std::process::ChildStderr>,
}

impl Relay {
    fn start(arguments: &[&str]) -> Self {
        Self::of_command(sterna(arguments))
    }

    /// Another command that listens.
    fn of(arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Self::of_command(command)
    }

    fn of_command(mut command: Command) -> Self {
        let mut process = command.spawn().unwrap();
        let lines = BufReader::new(process.stderr.take().unwrap());
        // From here on a panic kills the process.
        let mut relay = Self { process, address: String::new(), metrics: None, lines };
        while relay.address.is_empty() {
            let mut line = String::new();
            assert!(relay.lines.read_line(&mut line).unwrap() > 0, "it has ended");
            let line = line.trim_end();
            if let Some(at) = line.strip_prefix("sterna: metrics at tcp:127.0.0.1:") {
                relay.metrics = Some(at.parse().unwrap());
            }
            if let Some((_, address)) = line.split_once("listening at ") {
                address.clone_into(&mut relay.address);
            }
        }
        relay
    }

    fn metrics(&self) -> u16 {
        self.metrics.expect("--metrics was given")
    }

    fn signal(&self) {
        let id = Pid::from_child(&self.process);
        kill_process(id, Signal::TERM).unwrap();
    }

    /// Exit status, and everything that the relay said.
    fn end(mut self) -> (Option<i32>, String) {
        let mut said = String::new();
        self.lines.read_to_string(&mut said).unwrap();
        (self.process.wait().unwrap().code(), said)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn refused(arguments: &[&str]) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = sterna(arguments).output().unwrap();
    (status.code(), String::from_utf8_lossy(&stderr).into_owned())
}

/// Relays at both ends of `directory`, with more arguments for each.
fn pair(directory: &Path, ours: &[&str], theirs: &[&str]) -> (Relay, Relay, UnixListener) {
    let target = UnixListener::bind(directory.join("web1.sock")).unwrap();
    let text = directory.to_str().unwrap();
    let door = [&["listen:tcp:127.0.0.1:0", "--route-dir", text, "--kind", "raw"], theirs].concat();
    let acceptor = Relay::start(&door);
    let (listen, to) = (format!("listen:unix:{text}/source"), format!("{}/web1", acceptor.address));
    let dialer = Relay::start(&[&[listen.as_str(), "--to", &to, "--kind", "raw"], ours].concat());
    (dialer, acceptor, target)
}

fn connect(directory: &Path, target: &UnixListener) -> (UnixStream, UnixStream) {
    let source = UnixStream::connect(directory.join("source")).unwrap();
    let (target, _) = target.accept().unwrap();
    [&source, &target].into_iter().for_each(|end| end.set_read_timeout(Some(PATIENCE)).unwrap());
    (source, target)
}

fn exchange((mut source, mut target): (UnixStream, UnixStream)) {
    let bytes: Vec<u8> = (0..200_000_u32).map(|at| (at % 251) as u8).collect();
    let sender = {
        let (mut source, bytes) = (source.try_clone().unwrap(), bytes.clone());
        std::thread::spawn(move || {
            source.write_all(&bytes).unwrap();
            source.shutdown(Shutdown::Write).unwrap();
        })
    };
    let mut got = Vec::new();
    target.read_to_end(&mut got).unwrap();
    assert!(got == bytes);
    sender.join().unwrap();
    target.write_all(b"answer").unwrap();
    target.shutdown(Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    source.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"answer");
}

#[test]
fn relay_carries_bytes_with_certificates_and_ends_when_no_session_is_open() {
    let directory = tempfile::tempdir().unwrap();
    let certificates = certificates::good_directory();
    let tls = ["--tls-dir", certificates.path().to_str().unwrap(), "--tls-hostname", "localhost"];
    let (dialer, acceptor, target) = pair(directory.path(), &tls, &tls[..2]);

    let ends = connect(directory.path(), &target);
    dialer.signal();
    exchange(ends);

    let (status, said) = dialer.end();
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("began, route web1") && said.contains("all flows are over"), "{said}");
    acceptor.signal();
    let (status, said) = acceptor.end();
    assert_eq!(status, Some(0), "{said}");
}

#[test]
fn relay_with_a_secret_refuses_a_relay_without_one() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("secret");
    std::fs::write(&file, [7; 32]).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let (dialer, acceptor, _target) = pair(directory.path(), &[], &["--secret", file.to_str().unwrap()]);

    let mut source = UnixStream::connect(directory.path().join("source")).unwrap();
    source.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(!matches!(source.read(&mut [0; 1]), Ok(1..)), "closed");

    for relay in [dialer, acceptor] {
        relay.signal();
        let (status, said) = relay.end();
        assert!(status == Some(0) && said.contains("secret"), "{status:?} {said}");
    }
}

#[test]
fn relay_with_a_wrong_command_line_says_what_is_wrong() {
    for (arguments, wanted) in [
        (&["listen:unix:/x"][..], "no destination"),
        (&["unix:/x", "--to", "tcp:h:1/r"], "listen:unix:PATH"),
        (&["listen:unix:/x", "--to", "tcp:127.0.0.1:1"], "names no route"),
        (&["listen:unix:/x", "--to", "tcp:127.0.0.1:1/a b"], "is not a route"),
        (&["listen:unix:/x", "--to", "tcp:192.0.2.1:1/r"], "--insecure"),
        (&["listen:tcp:0.0.0.0:0", "--route", "a=unix:/x"], "--insecure"),
        (&["listen:tcp:127.0.0.1:0", "--route", "a"], "NAME=ADDRESS"),
        (&["listen:tcp:127.0.0.1:0", "--route-dir", "/does/not/exist"], "a directory that exists"),
        (&["--forward", "unix:/x"], "--forward"),
        (&["listen:unix:/x", "--to", "tcp:127.0.0.1:1/r", "--buffer", "1M"], "at least"),
    ] {
        let (status, said) = refused(arguments);
        assert!(status == Some(2) && said.contains(wanted), "{arguments:?}: {status:?} {said}");
    }
}
