//! Tests that a descriptor named on the command line is taken over once. The program must have been started
//! with it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

use sterna::Address;
use sterna_vmm::claim_inherited;

/// Number of the descriptor in the started program.
const NUMBER: i32 = 100;
const STARTED: &str = "STERNA_TEST_INHERITED";

fn claim(number: i32) -> std::io::Result<Address> {
    claim_inherited(Address::Fd(number.to_string()))
}

#[test]
fn descriptor_that_the_program_was_started_with_is_taken_over_once() {
    if std::env::var_os(STARTED).is_some() {
        return is_taken_over_once();
    }
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let name = std::thread::current().name().unwrap().to_owned();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &name, "--nocapture", "--test-threads=1"]).env(STARTED, "1");
    let number = ours.as_raw_fd();
    // SAFETY: dup2(2) may be called between fork and exec; `ours` is open until the child has started.
    unsafe {
        command.pre_exec(move || match libc::dup2(number, NUMBER) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }

    let started = command.output().unwrap();

    let said = [started.stdout, started.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(started.status.success(), "{}: {}", started.status, said.join("\n"));
}

/// Runs in the program that the test started.
fn is_taken_over_once() {
    // This descriptor survives an exec too, but the program opened it itself, as a C library might.
    let own: OwnedFd = UnixStream::pair().unwrap().0.into();
    rustix::io::fcntl_setfd(&own, rustix::io::FdFlags::empty()).unwrap();
    assert!(claim(own.as_raw_fd()).unwrap_err().to_string().contains("not started with"));

    let claimed: Vec<_> = std::thread::scope(|scope| {
        let claims: Vec<_> = (0..8).map(|_| scope.spawn(|| claim(NUMBER))).collect();
        claims.into_iter().filter_map(|claim| claim.join().unwrap().ok()).collect()
    });

    assert_eq!(claimed.len(), 1, "{claimed:?}");
    assert!(matches!(claimed[0], Address::Handed(_)));
    drop(claimed);
    // SAFETY: no pointers are passed.
    assert_eq!(unsafe { libc::fcntl(NUMBER, libc::F_GETFD) }, -1, "closed with what used it");
}

#[test]
fn address_that_names_no_descriptor_stays_as_it_is() {
    let elsewhere: Address = "tcp:127.0.0.1:1".parse().unwrap();

    assert_eq!(claim_inherited(elsewhere.clone()).unwrap(), elsewhere);
    for number in [-1, 0, 2, 987_654] {
        assert!(claim(number).is_err(), "{number}");
    }
}
