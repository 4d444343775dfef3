//! A lower bound for the downtime: a plain copy of the same devices, without a migration. Each device has its
//! own connection, and a thread at each end.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use sterna::{Address, DeviceStream, VmError};
use sterna_transport::{CancelFlag, Channel, Listener, TransportError};

use super::device::BenchDevice;

/// Bytes that are read, sent, received and loaded in one step: the chunk size of the engine.
const CHUNK_BYTES: usize = 256 << 10;
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Errors of a plain copy.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    /// A connection on loopback failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// A device failed to give or to load its state.
    #[error(transparent)]
    Device(#[from] VmError),
}

/// Copies the state of `from` to `to`. Returns the time that the copy took.
///
/// # Errors
/// A connection on loopback failed, or a device failed.
pub fn plain(from: &[Arc<BenchDevice>], to: &[Arc<BenchDevice>]) -> Result<Duration, LimitError> {
    let listener = Listener::bind(&Address::Tcp { host: "127.0.0.1".to_owned(), port: 0 })?;
    let never = CancelFlag::new();
    let connect = || -> Result<(Channel, Channel), TransportError> {
        let here = Channel::connect(&listener.local_address(), CONNECT_LIMIT, &never)?;
        Ok((here, listener.accept(Some(CONNECT_LIMIT), &never)?))
    };
    let connections = from.iter().map(|_| connect()).collect::<Result<Vec<_>, _>>()?;
    from.iter().try_for_each(|device| device.stop())?;
    let began = Instant::now();
    thread::scope(|scope| {
        let mut workers = Vec::new();
        for ((from, to), (sender, receiver)) in from.iter().zip(to).zip(&connections) {
            workers.push(scope.spawn(move || send(from, sender)));
            workers.push(scope.spawn(move || load(to, receiver)));
        }
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or(Ok(())))
    })?;
    Ok(began.elapsed())
}

fn send(device: &BenchDevice, channel: &Channel) -> Result<(), LimitError> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let count = device.read(&mut chunk)?;
        if count == 0 {
            return Ok(channel.finish_writing()?);
        }
        channel.write_all(&chunk[..count])?;
    }
}

fn load(device: &BenchDevice, channel: &Channel) -> Result<(), LimitError> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let mut held = 0;
        while held < CHUNK_BYTES {
            match channel.read_some(&mut chunk[held..])? {
                0 => break,
                count => held += count,
            }
        }
        device.write(&chunk[..held])?;
        if held < CHUNK_BYTES {
            return Ok(());
        }
    }
}
