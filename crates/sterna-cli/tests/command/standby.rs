//! The output of `sterna standby` for scripts, before a primary connects.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// Kills the command when the test ends, also by a panic.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // An error means that the command has already exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn first_line_of_json_says_where_it_listens_and_it_does() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("standby");
    for at in [format!("listen:unix:{}", socket.display()), "listen:tcp:127.0.0.1:0".to_owned()] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        command.args(["standby", &at, "--insecure", "--json", "--image"]).arg(directory.path().join("image"));
        let mut standby = Ended(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap());
        let mut first = String::new();
        BufReader::new(standby.0.stdout.take().unwrap()).read_line(&mut first).unwrap();

        let first: serde_json::Value = serde_json::from_str(&first).unwrap();

        assert_eq!(
            (&first["schema"], &first["state"]),
            (&"sterna-standby".into(), &"waiting".into()),
            "{first}"
        );
        let (kind, address) = first["address"].as_str().unwrap().split_once(':').unwrap();
        match kind {
            "unix" => drop(UnixStream::connect(address).unwrap()),
            _ => drop(TcpStream::connect(address).unwrap()),
        }
    }
}

#[test]
fn standby_that_is_ended_before_a_primary_came_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.arg("standby").arg(format!("listen:unix:{}", directory.path().join("standby").display()));
    command.arg("--image").arg(directory.path().join("image")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut standby = Ended(command.spawn().unwrap());
    let mut lines = BufReader::new(standby.0.stdout.take().unwrap());
    let mut first = String::new();
    lines.read_line(&mut first).unwrap();

    kill_process(Pid::from_child(&standby.0), Signal::INT).unwrap();

    let ended = std::io::read_to_string(standby.0.stderr.take().unwrap()).unwrap();
    assert!(ended.contains("no primary had connected"), "{ended}");
    assert_eq!(
        (first.as_str(), std::io::read_to_string(lines).unwrap().as_str()),
        ("waiting for a primary\n", "")
    );
}

#[test]
fn image_without_a_directory_and_an_open_address_are_refused_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let nowhere = directory.path().join("nowhere/image");
    let refused = [
        (
            vec!["listen:tcp:127.0.0.1:0", "--insecure", "--image", nowhere.to_str().unwrap()],
            "does not exist: create it",
        ),
        (vec!["listen:tcp:192.0.2.1:0", "--image", image.to_str().unwrap()], "--secret"),
    ];
    for (arguments, why) in refused {
        let ended =
            Command::new(env!("CARGO_BIN_EXE_sterna")).arg("standby").args(&arguments).output().unwrap();
        assert!(!ended.status.success(), "{arguments:?}");
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn secret_alone_lets_a_standby_listen_beyond_loopback() {
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("secret");
    std::fs::write(&secret, [7; 32]).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    // An address of no host: the command gets as far as listening there, which fails.
    command.args(["standby", "listen:tcp:192.0.2.1:0", "--secret"]).arg(&secret);
    let ended = command.arg("--image").arg(directory.path().join("image")).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(said.contains("192.0.2.1") && !said.contains("--secret"), "{said}");
}
