//! `sterna convert` as users run it: pipes, and files after Ctrl-C.

use crate::support;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The head of a legacy stream with one block `m` of one page.
/// It is followed by `records` zero records for that page.
fn stream(records: usize) -> Vec<u8> {
    let mut out = b"QEVM\0\0\0\x03\x07\0\0\0\x04none".to_vec();
    out.extend(b"\x01\0\0\0\x01\x03ram\0\0\0\0\0\0\0\x04");
    out.extend((4096u64 | 4).to_be_bytes());
    out.extend(b"\x01m\0\0\0\0\0\0\x10\0");
    out.extend(b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x01");
    out.extend(b"\x02\0\0\0\x01");
    out.extend(b"\0\0\0\0\0\0\0\x02\x01m\0");
    for _ in 1..records {
        out.extend(b"\0\0\0\0\0\0\0\x22\0");
    }
    out
}

pub(crate) fn whole() -> Vec<u8> {
    let end = b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x01";
    let device = b"\x04\0\0\0\x02\x01d\0\0\0\0\0\0\0\x01body\x7e\0\0\0\x02\0";
    [&stream(1), &end[..], b"\x03\0\0\0\x01", end, device].concat()
}

fn sterna() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A child process that is killed when the test ends, also by a panic.
pub(crate) struct Killed(pub(crate) Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Both calls fail if the process has already exited, which is fine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn convert_to_standard_output_writes_nothing_but_the_stream_there() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    std::fs::write(&source, whole()).unwrap();

    let done = sterna().arg("convert").arg(&source).args(["-", "--json"]).output().unwrap();

    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(done.stdout == whole(), "{} bytes, not {}", done.stdout.len(), whole().len());
    assert!(said.contains("sterna-convert"), "{said}");
}

#[test]
fn convert_that_is_told_to_end_leaves_no_guest_memory_behind() {
    let directory = tempfile::tempdir().unwrap();
    let files = || -> Vec<PathBuf> {
        std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    let mut convert = sterna();
    convert.args(["convert", "-"]).arg(directory.path().join("target")).args(["--format", "legacy"]);
    let mut convert = Killed(convert.spawn().unwrap());
    // The pipe stays open, so that the command waits for more input.
    let mut input = convert.0.stdin.take().unwrap();
    input.write_all(&stream(100_000)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while files().is_empty() {
        assert!(Instant::now() < deadline, "no file aside");
        std::thread::sleep(Duration::from_millis(5));
    }

    let process = rustix::process::Pid::from_child(&convert.0);
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    let status = convert.0.wait().unwrap();

    assert_eq!(status.code(), Some(130));
    assert_eq!(files(), [] as [PathBuf; 0]);
    drop(input);
}

/// Runs `sterna convert` on a host with these programs. Returns the format that it chose.
fn converted(directory: &Path, line: &[&Path], versions: &[(&str, &str)]) -> String {
    let mut convert = sterna();
    convert.env("PATH", support::programs(directory, versions)).args(["convert", "--json"]).args(line);
    let done = convert.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let told: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    told["target"]["kind"].as_str().unwrap().to_owned()
}

#[test]
fn convert_of_libvirts_image_makes_what_qemu_and_libvirt_here_both_know() {
    for (versions, wanted) in support::MACHINES {
        let directory = tempfile::tempdir().unwrap();
        let [stream, xml, source, target] =
            ["stream", "xml", "source", "target"].map(|name| directory.path().join(name));
        std::fs::write(&stream, whole()).unwrap();
        std::fs::write(&xml, "<domain/>").unwrap();
        let mut wrap = sterna();
        wrap.arg("convert").args([&stream, &source]).args(["--format", "libvirt-zstd", "--xml"]).arg(&xml);
        assert!(wrap.output().unwrap().status.success());

        let made = converted(directory.path(), &[&source, &target], versions);

        assert_eq!(made, wanted, "{versions:?}");
    }
}

#[test]
fn convert_with_a_format_makes_that_whatever_is_known_here() {
    let directory = tempfile::tempdir().unwrap();
    let [stream, xml, target] = ["stream", "xml", "target"].map(|name| directory.path().join(name));
    std::fs::write(&stream, whole()).unwrap();
    std::fs::write(&xml, "<domain/>").unwrap();
    let [format, sparse, with] = ["--format", "libvirt-sparse", "--xml"].map(Path::new);

    let made = converted(directory.path(), &[&stream, &target, format, sparse, with, &xml], &[]);

    assert_eq!(made, "libvirt-sparse");
}

#[test]
fn convert_of_a_bare_image_makes_mapped_ram_whatever_libvirt_is_here() {
    let directory = tempfile::tempdir().unwrap();
    let [stream, target] = ["stream", "target"].map(|name| directory.path().join(name));
    std::fs::write(&stream, whole()).unwrap();

    let made = converted(directory.path(), &[&stream, &target], &[("virsh", "9.0.0")]);

    assert_eq!(made, "mapped-ram");
}

#[test]
fn inspect_that_would_draw_over_the_image_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    std::fs::write(&image, whole()).unwrap();

    let done = sterna().arg("inspect").arg(&image).arg("--svg").arg(&image).output().unwrap();

    assert_eq!(done.status.code(), Some(2));
    assert!(std::fs::read(&image).unwrap() == whole());
}
