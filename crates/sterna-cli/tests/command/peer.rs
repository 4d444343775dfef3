//! Images and peers without a monitor, when the connection or the peer fails.

use crate::support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use sterna::{Address, Capabilities, Parameters};
use sterna_image::{BlockShape, Image, MappedOptions, MappedWriter, Shape};
use sterna_opaque::{ImagePlan, receive};

pub fn image(path: &Path) {
    let mut shape = Shape { has_configuration: true, has_end: true, has_eof: true, ..Shape::empty() };
    shape.configuration.machine_type = "none".into();
    shape.ram.footers = true;
    shape.ram.blocks.push(BlockShape {
        name: "m0".into(),
        length_bytes: 16 << 12,
        address: None,
        host_page_bytes: None,
        is_skipped: false,
    });
    MappedWriter::create(path, &shape, MappedOptions::default()).unwrap().complete(&shape).unwrap();
}

/// Forwards one connection to port `to` until the acknowledgement (SHUT) arrives.
/// The acknowledgement is lost, and later connections fail, because the listener is closed.
fn lose_the_acknowledgement(listener: TcpListener, to: u16) {
    let (source, _) = listener.accept().unwrap();
    let destination = TcpStream::connect(("127.0.0.1", to)).unwrap();
    let (mut from, mut onward) = (source.try_clone().unwrap(), destination.try_clone().unwrap());
    std::thread::spawn(move || std::io::copy(&mut from, &mut onward));
    let (mut answers, mut back) = (destination, source);
    let mut seen = Vec::new();
    let mut buffer = [0; 512];
    while let Ok(count @ 1..) = answers.read(&mut buffer) {
        seen.extend_from_slice(&buffer[..count]);
        if seen.windows(4).any(|bytes| bytes == [0, 1, 0, 4]) {
            break;
        }
        back.write_all(&buffer[..count]).unwrap();
    }
    drop(listener);
    back.shutdown(Shutdown::Both).unwrap();
}

#[test]
fn restore_to_a_peer_whose_acknowledgement_is_lost_ends_as_undecided_when_it_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    image(&path);
    let plan = ImagePlan {
        path: directory.path().join("arrived"),
        options: MappedOptions::default(),
        convert: None,
    };
    let at: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let receiving = receive(&at, plan, Parameters::default(), Capabilities::default(), Arc::new(())).unwrap();
    let port = receiving.address().to_string().rsplit(':').next().unwrap().parse().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("send:tcp:{}", listener.local_addr().unwrap());
    std::thread::spawn(move || lose_the_acknowledgement(listener, port));

    let mut child = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .arg("restore")
        .arg(&path)
        .arg(to)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    while !said.contains("acknowledgement was lost") {
        assert!(lines.read_line(&mut said).unwrap() > 0, "{said}");
    }
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    lines.read_to_string(&mut said).unwrap();

    assert_eq!(child.wait().unwrap().code(), Some(3), "{said}");
    assert!(said.contains("undecided") && said.contains("Find out whether"), "{said}");
    receiving.wait().expect("it has the machine");
}

#[test]
fn save_of_a_peers_domain_makes_what_qemu_and_libvirt_here_both_know() {
    for (versions, wanted) in support::MACHINES {
        let directory = tempfile::tempdir().unwrap();
        let [from, xml, saved, socket] =
            ["from", "xml", "saved", "socket"].map(|name| directory.path().join(name));
        image(&from);
        std::fs::write(&xml, "<domain/>").unwrap();
        let mut save = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .env("PATH", support::programs(directory.path(), versions))
            .args(["save", "--json", &format!("listen:unix:{}", socket.display())])
            .arg(&saved)
            .arg("--xml")
            .arg(&xml)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        let mut lines = BufReader::new(save.stderr.take().unwrap());
        while !said.contains("listening at") {
            assert!(lines.read_line(&mut said).unwrap() > 0, "{said}");
        }

        let sent = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .arg("restore")
            .arg(&from)
            .arg(format!("send:unix:{}", socket.display()))
            .output()
            .unwrap();

        let output = save.wait_with_output().unwrap();
        lines.read_to_string(&mut said).unwrap();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&sent.stderr));
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(told["format"], wanted, "{versions:?}");
        assert_eq!(Image::open(&saved).unwrap().format().name(), wanted, "{versions:?}");
    }
}
