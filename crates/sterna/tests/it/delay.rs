//! A network between the two sides that delays each connection by a time of its own.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use sterna::Address;

/// Forwards connections to `to`; the n-th one's bytes arrive there `delays[n]` late (0 beyond the list).
/// What comes back is not delayed. Its threads end with the connections; the listener, with the process.
pub fn network(to: &Address, delays: Vec<Duration>) -> Address {
    let Address::Tcp { host, port } = to else { panic!("{to} is not TCP") };
    let to = (host.clone(), *port);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its number").port();
    std::thread::spawn(move || {
        for (index, from) in listener.incoming().take(delays.len()).enumerate() {
            let from = from.expect("a connection");
            let Ok(onward) = TcpStream::connect((to.0.as_str(), to.1)) else { break };
            let delay = delays[index];
            forward(onward.try_clone().unwrap(), from.try_clone().unwrap(), Duration::ZERO);
            forward(from, onward, delay);
        }
    });
    Address::Tcp { host: "127.0.0.1".into(), port }
}

fn forward(mut from: TcpStream, to: TcpStream, delay: Duration) {
    let (queue, due) = channel();
    std::thread::spawn(move || deliver(to, &due));
    std::thread::spawn(move || {
        let mut bytes = vec![0; 256 << 10];
        while let Ok(read) = from.read(&mut bytes) {
            if read == 0 || queue.send((Instant::now() + delay, bytes[..read].to_vec())).is_err() {
                break;
            }
        }
    });
}

fn deliver(mut to: TcpStream, due: &Receiver<(Instant, Vec<u8>)>) {
    for (at, bytes) in due {
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            // The receiver is gone: let the sender know.
            let _ = to.shutdown(Shutdown::Both);
            return;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
