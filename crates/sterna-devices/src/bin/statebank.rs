//! `sterna-statebank`: a vfio-user device whose state shows whether it arrived intact.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use sterna_devices::statebank::{Fault, StateBank, StateBankConfig, Verdict};
use sterna_devices::vfio_user::{Server, ServerEnd};

/// A device model with a vfio-user socket and state of any size. Every byte is checked when it is loaded.
///
/// It serves one client and ends when the client disconnects: with 0, or with 3 if the loaded state differs from the
/// saved state, or guest RAM from what was written. Sizes accept K, M, G (powers of 1024).
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Where clients connect.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Size of its state, bytes.
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = size)]
    state: u64,
    /// Bytes per second at which it is read; 0: no limit.
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size)]
    read_rate: u64,
    /// Bytes per second at which it is loaded; 0: no limit.
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size)]
    load_rate: u64,
    /// Per cent of the state that can be read while it runs.
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=100))]
    precopy: u8,
    /// Bytes of its state that it changes per second while it runs.
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size)]
    dirty_rate: u64,
    /// Pages of guest RAM that it writes per second until it is stopped.
    #[arg(long, value_name = "PAGES", default_value_t = 0)]
    dma_dirty: u64,
    /// Where it writes, as guest-physical FIRST:SIZE. By default everywhere, which no guest survives.
    #[arg(long, value_name = "FIRST:SIZE", value_parser = window)]
    dma_window: Option<(u64, u64)>,
    /// Seed of its content.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Do not support the P2P states.
    #[arg(long)]
    no_p2p: bool,
    /// A fault that happens once: die, hang or fail @ running, running-p2p, pre-copy, pre-copy-p2p, stop, stop-copy or
    /// resuming, with :BYTE while reading or writing.
    #[arg(long, value_name = "KIND@STATE[:BYTE]")]
    fault: Option<Fault>,
    /// Serve further clients.
    #[arg(long)]
    keep: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(code) => code,
        Err(error) => {
            // The error cannot be reported if standard error fails.
            let _ = writeln!(std::io::stderr(), "sterna-statebank: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let bank = StateBank::new(StateBankConfig {
        name: format!("statebank at {}", arguments.socket.display()),
        state_bytes: arguments.state,
        read_rate: arguments.read_rate,
        load_rate: arguments.load_rate,
        precopy_percent: arguments.precopy,
        dirty_rate: arguments.dirty_rate,
        dma_rate: arguments.dma_dirty,
        dma_window: arguments.dma_window,
        seed: arguments.seed,
        p2p: !arguments.no_p2p,
        fault: arguments.fault,
        dies_with_process: true,
        ..StateBankConfig::default()
    })?;
    let server = Server::bind(&arguments.socket, bank.clone())?;
    loop {
        let end = server.serve_next()?;
        let status = bank.status();
        let error = bank.load_error().map_or(String::new(), |error| format!("; {error}"));
        writeln!(
            std::io::stdout(),
            "state {} loaded {:?} ram {:?} digest {:#018x} read {} took {} dma-writes {}{error}",
            status.state,
            status.loaded,
            status.ram,
            status.digest,
            status.read_bytes,
            status.loaded_bytes,
            status.dma_writes,
        )?;
        if status.loaded == Verdict::Bad || status.ram == Verdict::Bad {
            return Ok(ExitCode::from(3));
        }
        match end {
            Some(ServerEnd::Disconnected) if arguments.keep => {}
            None | Some(ServerEnd::Disconnected | ServerEnd::HungUp) => return Ok(ExitCode::SUCCESS),
            Some(ServerEnd::Misbehaved(error)) => return Err(error.into()),
            Some(ServerEnd::Broken(error)) => return Err(error.into()),
        }
    }
}

fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size; write a number, optionally with K, M or G");
    if let Some(hex) = text.strip_prefix("0x") {
        return u64::from_str_radix(hex, 16).map_err(|_| wrong());
    }
    let (number, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

fn window(text: &str) -> Result<(u64, u64), String> {
    let (first, bytes) = text.split_once(':').ok_or("a window is FIRST:SIZE")?;
    Ok((size(first)?, size(bytes)?))
}
