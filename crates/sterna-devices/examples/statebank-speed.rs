//! Measures how fast a statebank's state moves from one process to another. The processes run on the same
//! host and use vfio-user.
//!
//! ```text
//! cargo build --release -p sterna-devices
//! cargo run --release -p sterna-devices --example statebank-speed -- target/release/sterna-statebank 100M 400M
//! ```
//!
//! Arguments: the program, bytes of state, and the rate of reading and loading in bytes per second (0: no
//! limit).
#![allow(clippy::print_stdout)]

use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::DeviceStream;
use sterna_devices::vfio::VfioDevice;
use sterna_devices::vfio_user::{Client, ClientOptions};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [program, state, rate] = arguments.as_slice() else {
        return Err("give the program, bytes of state, and bytes per second".into());
    };
    let directory = std::env::temp_dir().join(format!("statebank-speed-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let measured = measure(program, state, rate, &directory);
    std::fs::remove_dir_all(&directory)?;
    measured
}

fn measure(program: &str, state: &str, rate: &str, directory: &Path) -> Result<(), Failure> {
    let arguments = ["--state", state, "--read-rate", rate, "--load-rate", rate];
    let (mut from, source) = start(program, &arguments, &directory.join("source"))?;
    let (mut to, target) = start(program, &arguments, &directory.join("target"))?;
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    source.begin_save()?;
    target.begin_load()?;
    source.quiesce()?;
    let began = Instant::now();
    source.stop()?;
    let stopped = began.elapsed();
    let mut reading = Duration::ZERO;
    loop {
        let asked = Instant::now();
        let read = source.read(&mut buffer)?;
        reading += asked.elapsed();
        if read == 0 {
            break;
        }
        target.write(&buffer[..read])?;
        bytes += read;
    }
    let moved = began.elapsed() - stopped;
    target.finish_load(&[])?;
    target.run()?;
    let all = began.elapsed();
    let rate = bytes as f64 / moved.as_secs_f64() / 1e6;
    println!(
        "stopped in {stopped:?}; {bytes} bytes in {moved:?}, {rate:.0} MB/s, of which reading {reading:?}"
    );
    println!("from stop to run {all:?}");
    source.end_save()?;
    drop((source, target));
    from.wait()?;
    to.wait()?;
    Ok(())
}

fn start(
    program: &str,
    arguments: &[&str],
    path: &Path,
) -> Result<(Child, VfioDevice<Arc<Client>>), Failure> {
    let child = Command::new(program).arg("--socket").arg(path).args(arguments).spawn()?;
    let began = Instant::now();
    loop {
        match Client::connect(path, &ClientOptions::default()) {
            Ok(client) => return Ok((child, VfioDevice::new(Arc::new(client))?)),
            Err(error) if began.elapsed() > Duration::from_secs(10) => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
