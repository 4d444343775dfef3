//! Limits of the process, and a peer that does not answer. Each is an error with its cause, and leaves no
//! files.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use sterna_image::{BlockShape, MappedOptions, MappedWriter, Shape};
use sterna_transport::IoPart;

use crate::save::Process;

const PAGE: usize = 4096;

/// A Unix socket that accepts no connection, and whose queue is full.
struct FullQueue {
    _listener: OwnedFd,
    _waiting: Vec<OwnedFd>,
}

impl FullQueue {
    fn at(path: &Path) -> Self {
        let socket = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
        };
        let (listener, address) = (socket(), SocketAddrUnix::new(path).unwrap());
        bind(&listener, &address).unwrap();
        listen(&listener, 0).unwrap();
        let mut waiting = Vec::new();
        loop {
            let client = socket();
            match connect(&client, &address) {
                Ok(()) => waiting.push(client),
                Err(error) => {
                    assert_eq!(error, rustix::io::Errno::AGAIN, "the queue is full");
                    return Self { _listener: listener, _waiting: waiting };
                }
            }
        }
    }
}

/// A sound image with 4 MiB of data.
fn image(path: &Path) {
    image_of(path, 4 << 20);
}

fn image_of(path: &Path, bytes: u64) {
    let mut shape = Shape { has_configuration: true, has_end: true, has_eof: true, ..Shape::empty() };
    shape.configuration.machine_type = "none".into();
    shape.ram.footers = true;
    shape.ram.blocks.push(BlockShape {
        name: "m0".into(),
        length_bytes: bytes,
        address: None,
        host_page_bytes: None,
        is_skipped: false,
    });
    let writer = MappedWriter::create(path, &shape, MappedOptions::default()).unwrap();
    let mut random = 1u64;
    for page in 0..bytes / PAGE as u64 {
        let content: Vec<u8> = std::iter::repeat_with(|| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 56) as u8
        })
        .take(PAGE)
        .collect();
        writer.write(0, page, &[IoPart::Bytes(&content)]).unwrap();
    }
    writer.complete(&shape).unwrap();
}

/// `sterna`, started by a shell with limits.
fn limited(limits: &str) -> Command {
    let mut shell = Command::new("bash");
    shell.arg("-c").arg(format!("ulimit {limits}; exec \"$0\" \"$@\"")).arg(env!("CARGO_BIN_EXE_sterna"));
    shell
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn files(directory: &Path) -> Vec<String> {
    let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn monitor_that_accepts_nobody_is_given_up_with_the_cause() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("qmp");
    let _full = FullQueue::at(&socket);
    let began = Instant::now();

    let info = Command::new(env!("CARGO_BIN_EXE_sterna")).arg("info").arg(&socket).output().unwrap();

    assert_eq!(info.status.code(), Some(1), "{}", said(&info));
    assert!(said(&info).contains("queue of connections has been full"), "{}", said(&info));
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}

/// Waits until the process has a handler for SIGINT, which would end it before.
fn wait_until_ctrl_c_is_caught(process: u32) {
    const SIGINT_BIT: u64 = 1 << 1;
    let began = Instant::now();
    let caught = || {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap()
    };
    while caught() & SIGINT_BIT == 0 {
        assert!(began.elapsed() < Duration::from_secs(60), "it does not catch Ctrl-C");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn interrupt_ends_connecting_to_a_monitor_and_the_wait_for_its_greeting() {
    let directory = tempfile::tempdir().unwrap();
    let (full, silent) = (directory.path().join("full"), directory.path().join("silent"));
    let _full = FullQueue::at(&full);
    let _silent = std::os::unix::net::UnixListener::bind(&silent).unwrap();
    for socket in [full, silent] {
        let save = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .arg("save")
            .arg(&socket)
            .arg(directory.path().join("image"))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        wait_until_ctrl_c_is_caught(save.id());
        // The process connects immediately afterwards.
        std::thread::sleep(Duration::from_millis(500));
        let began = Instant::now();

        assert!(Command::new("kill").args(["-INT", &save.id().to_string()]).status().unwrap().success());

        let output = save.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{}", said(&output));
        assert!(said(&output).contains("interrupted while connecting"), "{}", said(&output));
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    }
    assert_eq!(files(directory.path()), ["full", "silent"]);
}

#[test]
fn socket_of_a_monitor_that_hangs_is_not_waited_for_and_not_taken_over() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("qmp");
    let _full = FullQueue::at(&socket);

    let run = Command::new("timeout")
        .arg("20")
        .arg(env!("CARGO_BIN_EXE_sterna"))
        .args(["run", "--machine=process", "--ram=16M"])
        .arg(format!("--qmp=unix:{}", socket.display()))
        .output()
        .unwrap();

    assert_eq!(run.status.code(), Some(1), "{}", said(&run));
    assert!(said(&run).contains("another program listens there"), "{}", said(&run));
}

#[test]
fn reception_at_the_limit_of_open_files_ends_and_names_the_limit() {
    const CHANNELS: u8 = 32;
    let directory = tempfile::tempdir().unwrap();
    let mut save = limited("-n 20")
        .args(["save", "listen:tcp:127.0.0.1:0"])
        .arg(directory.path().join("image"))
        .args(["--cap", "multifd", "--set", &format!("multifd-channels={CHANNELS}")])
        .env("STERNA_LOG", "warn")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(save.stderr.take().unwrap());
    let mut said = String::new();
    lines.read_line(&mut said).unwrap();
    let port: u16 = said.trim().rsplit(':').next().unwrap().parse().expect("listening at tcp:HOST:PORT");
    let began = Instant::now();
    let channels: Vec<TcpStream> = (0..CHANNELS)
        .map(|id| {
            let mut channel = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let mut hello = vec![0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1];
            hello.resize(64, 0);
            hello[24] = id;
            channel.write_all(&hello).unwrap();
            channel
        })
        .collect();

    lines.read_to_string(&mut said).unwrap();

    assert_eq!(save.wait().unwrap().code(), Some(1), "{said}");
    assert!(said.contains("ulimit -n") && said.contains("20 open files"), "{said}");
    assert_eq!(said.matches("cannot accept").count(), 1, "said once: {said}");
    assert!(began.elapsed() < Duration::from_secs(40), "{:?}", began.elapsed());
    assert!(files(directory.path()).is_empty());
    drop(channels);
}

#[test]
fn file_that_reaches_its_limit_fails_the_command_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let from = directory.path().join("from");
    image(&from);
    let lines: [&[&str]; 4] = [
        &["convert", "from", "to", "--format", "legacy"],
        &["convert", "from", "to", "--format", "mapped-ram"],
        &["convert", "from", "to", "--format", "legacy-zstd"],
        &["extract", "from", "to", "--arch", "x86-64"],
    ];
    for line in lines {
        let output = limited("-f 100").current_dir(directory.path()).args(line).output().unwrap();

        assert_eq!(output.status.code(), Some(1), "{line:?}: {}", said(&output));
        assert!(said(&output).contains("ulimit -f"), "{line:?}: {}", said(&output));
        assert_eq!(files(directory.path()), ["from"], "{line:?}");
    }
}

#[test]
fn save_whose_image_reaches_its_limit_leaves_the_guest_running_and_no_image() {
    let directory = tempfile::tempdir().unwrap();
    let vm = Process::start(directory.path().join("qmp"), &[]);
    for format in ["legacy", "legacy-zstd"] {
        let save = limited("-f 100")
            .args(["save", &vm.socket()])
            .arg(directory.path().join("image"))
            .args(["--format", format])
            .output()
            .unwrap();

        // With some formats, the VM writes the image itself, and the limits of this command do not apply.
        if save.status.code() == Some(0) {
            assert_eq!(format, "legacy");
            std::fs::remove_file(directory.path().join("image")).unwrap();
            vm.vm().execute("cont", serde_json::Value::Null).unwrap();
        } else {
            assert_eq!(save.status.code(), Some(1), "{format}: {}", said(&save));
        }
        assert_eq!(vm.vm().run_state().unwrap(), "running", "{format}: {}", said(&save));
        assert_eq!(files(directory.path()), ["qmp"], "{format}");
    }
}

/// The minimum that the command checks at its start does not include the memory of a compressor.
#[test]
fn memory_that_is_refused_in_the_middle_ends_the_command_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let from = directory.path().join("from");
    image_of(&from, 64 << 20);
    let domain =
        "<domain type='qemu'><name>x</name><uuid>11111111-2222-3333-4444-555555555555</uuid></domain>";
    std::fs::write(directory.path().join("xml"), domain).unwrap();
    // For this amount of data, xz uses a dictionary that needs more than these limits.
    let line = ["convert", "from", "to", "--format", "libvirt-xz", "--xml", "xml"];
    for limit in [70_000, 100_000, 130_000] {
        let output =
            limited(&format!("-d {limit}")).current_dir(directory.path()).args(line).output().unwrap();

        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "ulimit -d {limit}: {said}");
        assert!(said.contains("could not allocate memory") && said.contains("ulimit -d"), "{said}");
        assert_eq!(files(directory.path()), ["from", "xml"], "ulimit -d {limit}: {said}");
    }
}

#[test]
fn limit_of_memory_that_is_too_low_is_refused_before_anything_is_done() {
    let directory = tempfile::tempdir().unwrap();
    let from = directory.path().join("from");
    image(&from);
    for limit in ["-d 20000", "-v 60000"] {
        let convert =
            limited(limit).current_dir(directory.path()).args(["convert", "from", "to"]).output().unwrap();

        assert_eq!(convert.status.code(), Some(1), "{limit}: {}", said(&convert));
        assert!(said(&convert).contains("nothing was done"), "{limit}: {}", said(&convert));
        assert_eq!(files(directory.path()), ["from"], "{limit}");
    }
}
