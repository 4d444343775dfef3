//! Listening and connecting, with their limits and cancellation.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use sterna_transport::{
    Address, CancelFlag, Channel, DescriptorProblem, HandedFd, Listener, TransportError, connect_socket,
    is_abandoned,
};

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(30);

fn address(text: &str) -> Address {
    text.parse().unwrap()
}

fn meet(listener: &Listener, to: &Address) -> (Channel, Channel) {
    let flag = CancelFlag::new();
    let one = Channel::connect(to, LONG, &flag).unwrap();
    let other = listener.accept(Some(LONG), &flag).unwrap();
    one.write_all(b"?").unwrap();
    let mut byte = [0];
    other.read_exact(&mut byte).unwrap();
    (one, other)
}

#[test]
fn listener_every_tcp_spelling_meets() {
    for bound in ["tcp:127.0.0.1:0", "tcp:localhost:0", "tcp::0", "tcp:[::1]:0"] {
        let listener = match Listener::bind(&address(bound)) {
            Ok(listener) => listener,
            Err(error) if bound.contains("::1") => {
                use std::io::Write;
                let _ = writeln!(std::io::stderr(), "SKIPPED listener_every_tcp_spelling_meets: {error}");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let local = listener.local_address();
        assert!(matches!(local, Address::Tcp { port: 1.., .. }), "{local}");
        let (one, other) = meet(&listener, &local);
        assert!(one.peer().starts_with("tcp:") && other.peer().starts_with("tcp:"), "{}", other.peer());
    }
}

#[test]
fn listener_port_can_be_used_again_at_once() {
    let listener = Listener::bind(&address("tcp:127.0.0.1:0")).unwrap();
    let local = listener.local_address();
    let (one, other) = meet(&listener, &local);
    drop((other, one, listener));
    let listener = Listener::bind(&local).unwrap();
    meet(&listener, &local);
    assert!(matches!(Listener::bind(&local), Err(TransportError::Bind { .. })), "not while it is in use");
}

#[test]
fn listener_holds_many_connections_until_they_are_accepted() {
    let listener = Listener::bind(&address("tcp:127.0.0.1:0")).unwrap();
    let flag = CancelFlag::new();
    let ends: Vec<_> =
        (0..250).map(|_| Channel::connect(&listener.local_address(), LONG, &flag).unwrap()).collect();
    for _ in &ends {
        listener.accept(Some(LONG), &flag).unwrap();
    }
}

#[test]
fn listener_unix_stale_path_is_taken_over_and_live_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("sock");
    let address = Address::Unix(path.clone());
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "std leaves the path behind");

    let listener = Listener::bind(&address).unwrap();
    meet(&listener, &address);
    match Listener::bind(&address) {
        Err(TransportError::Bind { .. }) => {}
        result => panic!("stole a live socket: {result:?}"),
    }
    meet(&listener, &address);
    drop(listener);
    assert!(!path.exists(), "our path is removed");

    std::fs::write(&path, "a file").unwrap();
    assert!(Listener::bind(&address).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"a file", "what is no socket is left alone");
}

#[test]
fn listener_path_that_another_took_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("sock");
    let listener = Listener::bind(&Address::Unix(path.clone())).unwrap();
    // The new socket file has another inode, because the old inode is still in use.
    std::fs::rename(&path, directory.path().join("moved")).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    drop(listener);
    assert!(path.exists());
}

#[test]
fn accept_with_nobody_coming_ends_by_limit_cancel_and_close() {
    let listener = Listener::bind(&address("tcp:127.0.0.1:0")).unwrap();
    let flag = CancelFlag::new();
    match listener.accept(Some(SHORT), &flag) {
        Err(TransportError::TimedOut { after, .. }) => assert_eq!(after, SHORT),
        result => panic!("{result:?}"),
    }
    std::thread::scope(|scope| {
        let waiting =
            [scope.spawn(|| listener.accept(None, &flag)), scope.spawn(|| listener.accept(None, &flag))];
        std::thread::sleep(SHORT);
        flag.cancel();
        for waiting in waiting {
            assert!(waiting.join().unwrap().unwrap_err().is_cancelled());
        }
    });
    assert!(listener.accept(None, &flag).unwrap_err().is_cancelled(), "cancelled for good");
    // Another flag is not affected; closing the listener ends its wait.
    let other = CancelFlag::new();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| listener.accept(None, &other));
        std::thread::sleep(SHORT);
        listener.close();
        assert!(waiting.join().unwrap().unwrap_err().is_cancelled());
    });
    assert!(listener.accept(Some(LONG), &other).unwrap_err().is_cancelled());
}

#[test]
fn connect_refused_and_unknown_say_where() {
    let flag = CancelFlag::new();
    let free = Listener::bind(&address("tcp:127.0.0.1:0")).unwrap().local_address();
    for to in [free, address("unix:/nonexistent/sock"), address("tcp:no-such-host.invalid:1")] {
        match Channel::connect(&to, LONG, &flag) {
            Err(error @ TransportError::Connect { .. }) => {
                assert!(error.to_string().contains(&to.to_string()), "{error}");
            }
            result => panic!("{to}: {result:?}"),
        }
    }
}

/// A Unix listener that accepts no connection. Its queue is full, so connecting waits.
fn full_queue() -> (tempfile::TempDir, Address, std::os::fd::OwnedFd, Vec<Channel>) {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("full");
    let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&socket, 0).unwrap();
    let address = Address::Unix(path);
    let mut inside = Vec::new();
    while let Ok(channel) = Channel::connect(&address, SHORT, &CancelFlag::new()) {
        inside.push(channel);
    }
    (directory, address, socket, inside)
}

#[test]
fn connect_that_waits_ends_by_limit_and_cancel() {
    let (_directory, address, _socket, inside) = full_queue();
    assert!(!inside.is_empty());
    let flag = CancelFlag::new();
    let late = Channel::connect(&address, SHORT, &flag).unwrap_err();
    assert!(
        matches!(&late, TransportError::Connect { source, .. } if source.kind() == std::io::ErrorKind::TimedOut)
    );
    assert!(late.to_string().contains("queue of connections has been full"), "{late}");
    let Address::Unix(path) = &address else { panic!("{address}") };
    assert!(!is_abandoned(path).unwrap(), "its owner is alive");
    // Cancelling a parent cancels its child, but not the reverse.
    flag.child().cancel();
    assert!(!flag.is_cancelled());
    let parent = CancelFlag::new();
    let child = parent.child();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| connect_socket(&address, LONG, &child));
        std::thread::sleep(SHORT);
        parent.cancel();
        assert!(waiting.join().unwrap().unwrap_err().is_cancelled());
    });
    assert!(parent.child().is_cancelled(), "one that comes later");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| Channel::connect(&address, LONG, &flag));
        std::thread::sleep(SHORT);
        flag.cancel();
        assert!(waiting.join().unwrap().unwrap_err().is_cancelled());
    });
    let anywhere = self::address("tcp:127.0.0.1:1");
    assert!(Channel::connect(&anywhere, LONG, &flag).unwrap_err().is_cancelled());
}

#[test]
fn fd_connected_is_a_channel_once() {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let given = Address::Handed(HandedFd::new(ours.into(), "ours"));
    let listener = Listener::bind(&given).unwrap();
    let flag = CancelFlag::new();
    let channel = listener.accept(Some(LONG), &flag).unwrap();
    let peer =
        Channel::connect(&Address::Handed(HandedFd::new(theirs.into(), "theirs")), LONG, &flag).unwrap();
    peer.write_all(b"hi").unwrap();
    assert_eq!(channel.peek(2).unwrap(), b"hi");
    assert!(matches!(listener.accept(Some(LONG), &flag), Err(TransportError::System { .. })));
    assert!(Listener::bind(&given).unwrap_err().to_string().contains("fd:ours"), "it is used up");
    // The channel owns the descriptor, so dropping it closes the connection for the peer.
    drop((channel, listener));
    assert!(peer.read_some(&mut [0; 1]).is_ok_and(|count| count == 0) || peer.write_all(b"x").is_err());
}

#[test]
fn fd_listening_accepts() {
    let std_listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = std_listener.local_addr().unwrap().port();
    let there = Address::Tcp { host: "127.0.0.1".into(), port };
    let named = Listener::bind(&Address::Fd(std_listener.as_raw_fd().to_string())).unwrap();
    for _ in 0..3 {
        meet(&named, &there);
    }
    drop(named);
    let listener = Listener::bind(&Address::Handed(HandedFd::new(std_listener.into(), "theirs"))).unwrap();
    meet(&listener, &there);
    drop(listener);
    let refused = Channel::connect(&there, LONG, &CancelFlag::new());
    assert!(refused.is_err(), "what was handed over is closed with the listener");
}

#[test]
fn fd_that_is_named_is_left_to_its_owner() {
    let flag = CancelFlag::new();
    let (mut ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let named = Address::Fd(ours.as_raw_fd().to_string());
    let channel = Channel::connect(&named, LONG, &flag).unwrap();
    channel.write_all(b"a").unwrap();
    drop(channel);
    drop(Listener::bind(&named).unwrap());
    flag.cancel();
    assert!(Channel::connect(&named, LONG, &flag).unwrap_err().is_cancelled());
    ours.write_all(b"b").expect("the socket that was named is still its owner's");
    let mut bytes = [0; 2];
    theirs.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, *b"ab");
}

#[test]
fn fd_of_the_command_line_is_taken_over_once_and_only_if_it_was_inherited() {
    // SAFETY: open descriptors that have an owner below are close-on-exec, which is refused. The others have no owner.
    let claim = |number: i32| unsafe { Address::Fd(number.to_string()).claim_inherited() };
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    // A descriptor that this process opened has an owner here.
    assert!(claim(ours.as_raw_fd()).unwrap_err().to_string().contains("not inherited"));
    // The state after an exec: open, and without an owner.
    let number = ours.into_raw_fd();
    // SAFETY: the descriptor has no owner after the line above.
    let given = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_setfd(given, rustix::io::FdFlags::empty()).unwrap();
    let claimed = claim(number).unwrap();
    assert_eq!(claimed.to_string(), format!("fd:{number}"));
    assert!(claim(number).is_err(), "taken over twice");
    let channel = Channel::connect(&claimed, LONG, &CancelFlag::new()).unwrap();
    drop(channel);
    assert_eq!((&theirs).read(&mut [0]).unwrap(), 0, "closed with its channel");
    for number in [-1, 0, 2, 987_654] {
        assert!(claim(number).is_err(), "{number}");
    }
    let elsewhere = address("tcp:127.0.0.1:1");
    // SAFETY: the address names no descriptor.
    assert_eq!(unsafe { elsewhere.clone().claim_inherited() }.unwrap(), elsewhere);
}

#[test]
fn fd_that_is_no_socket_is_refused_and_left_open() {
    let flag = CancelFlag::new();
    let file = std::fs::File::open("/dev/null").unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&file);
    assert!(Channel::connect(&Address::Fd(number.to_string()), LONG, &flag).is_err());
    assert!(file.metadata().is_ok());
    for name in ["0", "2", "-1", "987654", "migration"] {
        assert!(Channel::connect(&Address::Fd(name.into()), LONG, &flag).is_err(), "{name}");
        assert!(Listener::bind(&Address::Fd(name.into())).is_err(), "{name}");
    }
}

#[test]
fn handed_listener_of_tcp_accepts_many_and_names_real_addresses() {
    let std_listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = std_listener.local_addr().unwrap().port();
    let there = Address::Tcp { host: "127.0.0.1".into(), port };
    let given = Address::from_listener(std_listener.into()).unwrap();
    assert!(!given.is_descriptor(), "it is no single channel");
    assert!(given.to_string().contains(&format!("127.0.0.1:{port}")), "{given}");
    let listener = Listener::bind(&given).unwrap();
    assert!(!listener.is_one_channel());
    assert_eq!(listener.local_address(), there, "a source can connect to it");
    for _ in 0..3 {
        let (one, other) = meet(&listener, &listener.local_address());
        assert_eq!(one.peer(), there.to_string());
        assert!(other.peer().starts_with("tcp:127.0.0.1:") && other.peer() != there.to_string());
    }
}

#[test]
fn handed_listener_of_unix_accepts_many_and_its_file_stays_with_its_owner() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("sock");
    let given = Address::from_listener(UnixListener::bind(&path).unwrap().into()).unwrap();
    let listener = Listener::bind(&given).unwrap();
    assert_eq!(listener.local_address(), Address::Unix(path.clone()));
    for _ in 0..3 {
        let (one, other) = meet(&listener, &listener.local_address());
        assert_eq!((one.peer(), other.peer()), (&*format!("unix:{}", path.display()), one.peer()));
    }
    drop(listener);
    assert!(path.exists(), "the VMM made it");
}

#[test]
fn handed_connection_is_one_channel_with_its_peers_address() {
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let client = std::net::TcpStream::connect(server.local_addr().unwrap()).unwrap();
    let (accepted, peer) = server.accept().unwrap();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let flag = CancelFlag::new();
    for (one, other, name) in [
        (accepted.into(), client.into(), Some(format!("tcp:{peer}"))),
        (ours.into(), std::os::fd::OwnedFd::from(theirs), None),
    ] {
        let given = Address::from_connected(one).unwrap();
        assert!(given.is_descriptor());
        let listener = Listener::bind(&given).unwrap();
        assert!(listener.is_one_channel());
        let here = listener.accept(Some(LONG), &flag).unwrap();
        assert!(name.is_none_or(|name| here.peer() == name), "{}", here.peer());
        let there = Channel::connect(&Address::from_connected(other).unwrap(), LONG, &flag).unwrap();
        there.write_all(b"hi").unwrap();
        assert_eq!(here.peek(2).unwrap(), b"hi");
    }
}

#[test]
fn handed_descriptor_of_another_kind_is_refused_by_name() {
    use DescriptorProblem as P;
    use std::os::fd::OwnedFd;
    type Make = fn() -> OwnedFd;
    type Is = fn(&P) -> bool;
    let file: Make = || std::fs::File::open("/dev/null").unwrap().into();
    let datagram: Make = || std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into();
    let sequenced: Make = || {
        use rustix::net::{AddressFamily, SocketType, socket};
        socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap()
    };
    let fresh: Make = || {
        use rustix::net::{AddressFamily, SocketType, socket};
        socket(AddressFamily::INET, SocketType::STREAM, None).unwrap()
    };
    let connected: Make = || std::os::unix::net::UnixStream::pair().unwrap().0.into();
    let listening: Make = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().into();
    let for_listener: [(Make, Is); 5] = [
        (file, |why| matches!(why, P::NotSocket)),
        (datagram, |why| matches!(why, P::Datagram)),
        (sequenced, |why| matches!(why, P::NotStream)),
        (fresh, |why| matches!(why, P::NotListening)),
        (connected, |why| matches!(why, P::Connected)),
    ];
    let for_connection: [(Make, Is); 5] = [
        (file, |why| matches!(why, P::NotSocket)),
        (datagram, |why| matches!(why, P::Datagram)),
        (sequenced, |why| matches!(why, P::NotStream)),
        (fresh, |why| matches!(why, P::NotConnected)),
        (listening, |why| matches!(why, P::Listening)),
    ];
    let refused = |made: Result<Address, TransportError>, is: Is| match made {
        Err(TransportError::Descriptor { why, .. }) => assert!(is(&why), "{why:?}"),
        other => panic!("{other:?}"),
    };
    for (make, is) in for_listener {
        refused(Address::from_listener(make()), is);
    }
    for (make, is) in for_connection {
        refused(Address::from_connected(make()), is);
    }
}
