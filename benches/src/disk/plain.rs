//! The machine's limit: a plain copy of the disk's data over sockets into another file.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::{MIB, PIECE_BYTES};

/// Offsets of each MiB that has data.
pub fn data_pieces(bytes: u64) -> impl Iterator<Item = u64> {
    (0..bytes).step_by(MIB as usize).filter(|at| (at / PIECE_BYTES).is_multiple_of(2))
}

/// Copies over `sockets` connections, and waits until the copy is durable.
pub fn copy(from: &Path, to: &Path, bytes: u64, sockets: usize) -> io::Result<Duration> {
    let (from, to) = (File::open(from)?, File::options().write(true).open(to)?);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for socket in 0..sockets {
            let share = move || data_pieces(bytes).skip(socket).step_by(sockets);
            let mut out = TcpStream::connect(address)?;
            let (mut into, _) = listener.accept()?;
            let (from, to) = (&from, &to);
            threads.push(scope.spawn(move || {
                let mut data = vec![0; MIB as usize];
                share().try_for_each(|at| {
                    from.read_exact_at(&mut data, at)?;
                    out.write_all(&data)
                })
            }));
            threads.push(scope.spawn(move || {
                let mut data = vec![0; MIB as usize];
                share().try_for_each(|at| {
                    into.read_exact(&mut data)?;
                    to.write_all_at(&data, at)
                })
            }));
        }
        for thread in threads {
            thread.join().map_err(|_| io::Error::other("a thread panicked"))??;
        }
        to.sync_data()
    })?;
    Ok(began.elapsed())
}
