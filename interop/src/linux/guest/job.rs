//! The work of a bench's guest instead of ticks: it runs programs of its root and prints their results.

use std::process::Command;

use serde_json::Value;

use super::network::LAB_ADDRESS;
use super::{ROOT, root};

/// Variable that names the job.
pub(super) const JOB: &str = "GUEST_JOB";
/// Job that measures rates of the second disk.
pub(in crate::linux) const FIO: &str = "fio";
/// Job that measures rates of the network card.
pub(in crate::linux) const IPERF: &str = "iperf";
/// Job that continuously writes 20 MB/s to the second disk.
pub(in crate::linux) const WRITES: &str = "writes";
/// Names of results, and the arguments of `fio` for each. MB/s for the first two, operations per second for
/// the others.
pub(in crate::linux) const FIO_RUNS: [(&str, [&str; 3]); 4] = [
    ("read_mb_s", ["--rw=read", "--bs=128k", "--iodepth=16"]),
    ("write_mb_s", ["--rw=write", "--bs=128k", "--iodepth=16"]),
    ("random_read_iops", ["--rw=randread", "--bs=4k", "--iodepth=32"]),
    ("random_write_iops", ["--rw=randwrite", "--bs=4k", "--iodepth=32"]),
];
/// Names of results in Mbit/s, and the arguments of `iperf3` for each.
pub(in crate::linux) const IPERF_RUNS: [(&str, &[&str]); 2] =
    [("sends_mbit_s", &[]), ("receives_mbit_s", &["-R"])];
const DISK: &str = "--filename=/dev/vdb";
const SECONDS: &str = "6";

/// Command-line part of a guest with that job.
pub(in crate::linux) fn line(job: &str) -> String {
    format!("{ROOT}=/dev/vda {JOB}={job}")
}

/// The words before a result.
pub(in crate::linux) fn result(name: &str) -> String {
    format!("GUEST-RESULT {name} ")
}

/// Runs the job to its end.
pub(super) fn run(job: &str) {
    match job {
        FIO => FIO_RUNS.iter().for_each(|(name, options)| told(name, fio(options))),
        IPERF => IPERF_RUNS.iter().for_each(|(name, options)| told(name, iperf(options))),
        WRITES => writes(),
        _ => println!("GUEST-RESULT there is no job {job}"),
    }
}

fn told(name: &str, rate: Result<f64, String>) {
    match rate {
        Ok(rate) => println!("{}{rate:.1}", result(name)),
        Err(why) => println!("GUEST-RESULT {name}: {why}"),
    }
}

fn fio(options: &[&str]) -> Result<f64, String> {
    let fixed =
        ["fio", "--name=a", DISK, "--direct=1", "--ioengine=libaio", "--time_based", "--runtime", SECONDS];
    let found = json_of(root::command(&fixed).args(options).arg("--output-format=json"))?;
    let job = &found["jobs"][0];
    let sum =
        |name: &str| job["read"][name].as_f64().unwrap_or(0.0) + job["write"][name].as_f64().unwrap_or(0.0);
    Ok(if options.contains(&"--bs=4k") { sum("iops") } else { sum("bw_bytes") / 1e6 })
}

fn iperf(options: &[&str]) -> Result<f64, String> {
    let address = std::net::Ipv4Addr::from(LAB_ADDRESS).to_string();
    let found = json_of(root::command(&["iperf3", "-J", "-t", SECONDS, "-c", &address]).args(options))?;
    let rate = found["end"]["sum_received"]["bits_per_second"].as_f64();
    rate.map(|rate| rate / 1e6).ok_or_else(|| format!("iperf3 said {found}").replace('\n', " "))
}

fn writes() {
    let arguments = [
        "fio",
        "--name=a",
        DISK,
        "--direct=1",
        "--ioengine=libaio",
        "--rw=randwrite",
        "--bs=64k",
        "--iodepth=4",
        "--rate=20m",
        "--time_based",
        "--runtime=600",
    ];
    match root::command(&arguments).stdout(std::process::Stdio::null()).spawn() {
        Ok(mut writer) => {
            std::thread::sleep(std::time::Duration::from_secs(3));
            println!("{}1", result(WRITES));
            let _ = writer.wait();
        }
        Err(error) => println!("GUEST-RESULT fio: {error}"),
    }
}

fn json_of(command: &mut Command) -> Result<Value, String> {
    let output = command.output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    // The program may print warnings before its JSON.
    let begin = text.find('{').unwrap_or(0);
    serde_json::from_str(&text[begin..]).map_err(|error| {
        format!("{error}: {text} {}", String::from_utf8_lossy(&output.stderr)).replace('\n', " ")
    })
}
