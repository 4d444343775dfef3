//! An operator's actions on a guest and on a destination while a migration runs.

use crate::common;

use std::sync::Arc;
use std::time::Duration;

use crate::support::{self, case, vm, vms};
use sterna::{Address, Incoming, RunState, SourceVm, TargetVm};

#[test]
fn cont_that_began_before_the_switchover_ends_before_it() {
    case("slow cont", || {
        let (source, target) = vms();
        let (params, capabilities) = common::multifd(2);
        let incoming = vm::listen(&target, &params, capabilities);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        let ran = migration.while_guest_is_free(|| {
            // Long enough for the complete migration, if the migration did not wait.
            std::thread::sleep(Duration::from_millis(500));
            let before = source.run_state();
            source.guest.cont().expect("it can run");
            before
        });
        assert_eq!(ran, Some(RunState::Running), "the guest was taken away in the middle of it");
        let (outcome, arrival) = (migration.wait(), incoming.wait());
        common::assert_arrived(&outcome, &arrival, &target.guest);
        assert_eq!(source.run_state(), RunState::Paused, "it runs twice");
        assert_eq!(migration.while_guest_is_free(|| source.guest.cont()).map(drop), None);
        assert_eq!(source.run_state(), RunState::Paused);
    });
}

#[test]
fn address_is_free_as_soon_as_the_last_handle_is_dropped() {
    case("listen again", || {
        let (_, target) = vms();
        let (params, capabilities) = (common::parameters(), sterna::Capabilities::default());
        let directory = tempfile::tempdir().unwrap();
        let port = support::port(&vm::listen(&target, &params, capabilities).address());
        let unix = Address::Unix(directory.path().join("migrate.sock"));
        for at in [Address::Tcp { host: "127.0.0.1".into(), port }, unix] {
            for time in 0..20 {
                let vm: Arc<dyn TargetVm> = Arc::clone(&target) as _;
                let incoming = Incoming::listen(vm, &at, params.clone(), capabilities, Arc::new(()));
                let incoming = incoming.unwrap_or_else(|error| panic!("{time}: {error}"));
                assert_eq!(incoming.address(), at);
            }
        }
    });
}

#[test]
fn connection_that_says_who_it_is_byte_by_byte_is_turned_away() {
    use std::io::{Read as _, Write as _};
    case("slow greeting", || {
        let (_, target) = vms();
        let (mut params, capabilities) = common::multifd(2);
        params.limits.setup = Duration::from_millis(400);
        let incoming = vm::listen(&target, &params, capabilities);
        let port = support::port(&incoming.address());
        let mut slow = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        slow.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let hello = sterna_wire::multifd::InitialPacket { uuid: [0; 16], id: 0 }.to_bytes();
        // The pauses between bytes are shorter than the limit, but the whole greeting takes longer.
        let ended = hello.iter().any(|byte| {
            let waits = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
            slow.write_all(&[*byte]).is_err() || !slow.read(&mut [0]).as_ref().is_err_and(waits)
        });
        assert!(ended, "it held its place to the last byte");
        assert_eq!(incoming.status(), sterna::Status::Setup, "and the migration waits on");
    });
}

#[test]
fn channels_that_each_take_long_to_connect_share_one_limit() {
    case("slow connects", || {
        let (source, _) = vms();
        let (mut params, capabilities) = common::multifd(16);
        params.limits.setup = Duration::from_millis(400);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("slow.sock");
        // The shortest queue: each connection waits until the previous one was accepted.
        let socket =
            rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None);
        let socket = socket.unwrap();
        rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let listener = std::os::unix::net::UnixListener::from(socket);
        listener.set_nonblocking(true).unwrap();
        let migration = vm::start(&source, &Address::Unix(path), &params, capabilities, Arc::new(()));
        let mut accepted = Vec::new();
        while migration.outcome().is_none() && accepted.len() < 17 {
            std::thread::sleep(Duration::from_millis(150));
            accepted.extend(listener.accept());
        }
        drop(listener);
        assert!(accepted.len() < 17, "all came, long after the limit");
        let outcome = migration.wait();
        assert!(matches!(outcome, sterna::Outcome::Failed { held: false, .. }), "{outcome:?}");
        common::assert_lives_on(&source.guest);
    });
}

/// Drops the last handle from within the observer.
#[derive(Default)]
struct LetGo {
    incoming: std::sync::Mutex<Option<Incoming>>,
    done: std::sync::atomic::AtomicBool,
}

impl sterna::Observer for LetGo {
    fn event(&self, event: &sterna::Event) {
        if matches!(event, sterna::Event::Warning(_)) {
            drop(self.incoming.lock().unwrap().take());
            self.done.store(true, std::sync::atomic::Ordering::SeqCst);
        }
    }
}

#[test]
fn last_handle_may_be_dropped_by_the_observer() {
    use std::io::Write as _;
    case("dropped by the observer", || {
        let (_, target) = vms();
        let (params, capabilities) = (common::parameters(), sterna::Capabilities::default());
        let observer = Arc::new(LetGo::default());
        let at: Address = "tcp:127.0.0.1:0".parse().unwrap();
        let incoming =
            Incoming::listen(target, &at, params, capabilities, Arc::clone(&observer) as _).unwrap();
        let port = support::port(&incoming.address());
        *observer.incoming.lock().unwrap() = Some(incoming);
        // This connection is rejected with a warning.
        let mut scanner = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        scanner.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        support::eventually("dropped", || observer.done.load(std::sync::atomic::Ordering::SeqCst));
    });
}
