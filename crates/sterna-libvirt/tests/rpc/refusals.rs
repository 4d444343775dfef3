//! Calls that libvirt refuses, with its reaction to each. The daemon has a running domain `web1`.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use sterna_libvirt::packet::{ErrorReply, Head, KEEP_ALIVE, PING, PONG, QEMU, REMOTE};
use sterna_libvirt::xdr::{Reader, Writer};

/// What libvirt does with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reaction {
    Refuses(i32),
    Accepts,
    Closes,
}

use Reaction::{Accepts, Closes, Refuses};

/// A call: name, program, version, procedure, status, arguments.
type Row = (&'static str, u32, u32, i32, i32, Vec<u8>, Reaction);

/// Sends every call of the table to the daemon at `socket`.
pub fn check(socket: &Path) -> Result<(), String> {
    let (mut stream, domain) = open(socket)?;
    let name = |name: &str| Writer::default().string(name).into_bytes();
    let command = |text: &str, flags: u32| {
        let text = Writer::default().string(text).u32(flags).into_bytes();
        [domain.clone(), text].concat()
    };
    let stranger = Writer::default().string("web1").fixed(&[1; 16]).i32(7).string("{}").u32(0).into_bytes();
    let long = "w".repeat((4 << 20) + 4);
    let query = r#"{"execute":"query-status"}"#;
    let numbered = r#"{"execute":"query-status","id":1}"#;
    let rows: Vec<Row> = vec![
        ("unknown program", 0x1234_5678, 1, 1, 0, Vec::new(), Refuses(39)),
        ("unknown version", REMOTE, 2, 23, 0, name("web1"), Refuses(39)),
        ("unknown procedure", QEMU, 1, 99, 0, Vec::new(), Refuses(39)),
        ("procedure 0", REMOTE, 1, 0, 0, Vec::new(), Refuses(39)),
        ("call with status 1", REMOTE, 1, 23, 1, name("web1"), Refuses(39)),
        ("no arguments", REMOTE, 1, 23, 0, Vec::new(), Refuses(39)),
        ("string without its end", REMOTE, 1, 23, 0, b"\0\0\x13\x88web1".to_vec(), Refuses(39)),
        ("string without padding", REMOTE, 1, 23, 0, b"\0\0\0\x05web12".to_vec(), Refuses(39)),
        ("string of more than 4 MiB", REMOTE, 1, 23, 0, name(&long), Refuses(39)),
        ("bytes after the arguments", REMOTE, 1, 23, 0, [name("web1"), vec![0; 8]].concat(), Accepts),
        ("no such domain", REMOTE, 1, 23, 0, name("nope"), Refuses(42)),
        ("no such UUID", REMOTE, 1, 24, 0, vec![1; 16], Refuses(42)),
        ("domain with another UUID", QEMU, 1, 1, 0, stranger, Refuses(42)),
        ("command that is not JSON", QEMU, 1, 1, 0, command("{\"execute\":", 0), Refuses(1)),
        ("command with an id", QEMU, 1, 1, 0, command(numbered, 0), Refuses(1)),
        ("command with unknown flags", QEMU, 1, 1, 0, command(query, 8), Refuses(8)),
        ("command", QEMU, 1, 1, 0, command(query, 0), Accepts),
    ];
    for (what, program, version, procedure, status, arguments, wanted) in rows {
        let head = Head { program, version, procedure, kind: Head::CALL, serial: 9, status };
        let got = react(&mut stream, &head.packet(&arguments))?;
        if got != wanted {
            return Err(format!("{what}: {got:?}, not {wanted:?}"));
        }
    }
    // PING is answered also if the client never said that it knows keep-alive messages.
    send(&mut stream, &Head::message(KEEP_ALIVE, PING).packet(&[]))?;
    let (head, _) = receive(&mut stream)?.ok_or("closed after PING")?;
    if head != Head::message(KEEP_ALIVE, PONG) {
        return Err(format!("the answer to PING is {head:?}"));
    }
    let lengths = [0u32, 4, 20, 27, (32 << 20) + 5, u32::MAX];
    for length in lengths {
        let (mut stream, _) = open(socket)?;
        // Lengths of less than a head are refused when the head should be there.
        let got = react(&mut stream, &[&length.to_be_bytes()[..], &[0; 40]].concat())?;
        if got != Closes {
            return Err(format!("a packet of {length} bytes: {got:?}"));
        }
    }
    let mut stream = connect(socket)?;
    let head = Head { program: REMOTE, version: 1, procedure: 23, kind: Head::CALL, serial: 9, status: 0 };
    match react(&mut stream, &head.packet(&name("web1")))? {
        Refuses(1) => Ok(()),
        got => Err(format!("a lookup before CONNECT_OPEN: {got:?}")),
    }
}

fn connect(socket: &Path) -> Result<UnixStream, String> {
    let stream = UnixStream::connect(socket).map_err(|error| format!("{}: {error}", socket.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(30))).map_err(|error| error.to_string())?;
    Ok(stream)
}

/// An open connection, and the encoded domain `web1`.
fn open(socket: &Path) -> Result<(UnixStream, Vec<u8>), String> {
    let mut stream = connect(socket)?;
    let call =
        |procedure, serial| Head { program: REMOTE, version: 1, procedure, kind: 0, serial, status: 0 };
    let uri = Writer::default().u32(1).string("qemu:///system").u32(0).into_bytes();
    let web1 = Writer::default().string("web1").into_bytes();
    let mut domain = Vec::new();
    for (procedure, arguments) in [(66, Vec::new()), (1, uri), (23, web1)] {
        send(&mut stream, &call(procedure, procedure as u32).packet(&arguments))?;
        let (head, payload) = receive(&mut stream)?.ok_or("closed")?;
        if head.status != 0 {
            return Err(format!("procedure {procedure}: {:?}", ErrorReply::decode(&payload)));
        }
        domain = payload;
    }
    Ok((stream, domain))
}

fn send(stream: &mut UnixStream, bytes: &[u8]) -> Result<(), String> {
    stream.write_all(bytes).map_err(|error| error.to_string())
}

fn react(stream: &mut UnixStream, packet: &[u8]) -> Result<Reaction, String> {
    // A daemon that closes may do so before all bytes are sent.
    let _ = stream.write_all(packet);
    Ok(match receive(stream)? {
        None => Closes,
        Some((head, _)) if head.status == 0 => Accepts,
        Some((_, payload)) => Refuses(ErrorReply::decode(&payload).map_err(|error| error.to_string())?.code),
    })
}

/// The next packet. None if the daemon has closed the connection.
fn receive(stream: &mut UnixStream) -> Result<Option<(Head, Vec<u8>)>, String> {
    let mut length = [0; 4];
    match stream.read_exact(&mut length) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Err("no answer".into()),
        Err(_) => return Ok(None),
    }
    let mut packet = vec![0; u32::from_be_bytes(length) as usize - 4];
    stream.read_exact(&mut packet).map_err(|error| error.to_string())?;
    let mut reader = Reader::new(&packet);
    let head = Head::decode(&mut reader).map_err(|error| error.to_string())?;
    Ok(Some((head, reader.rest().to_vec())))
}
