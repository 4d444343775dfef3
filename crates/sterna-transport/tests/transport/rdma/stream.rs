//! A channel over a byte stream cancels, stalls, counts and peeks like one over a socket.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sterna_transport::rdma::{Event, RdmaError};
use sterna_transport::{ByteStream, Channel, ChannelGroup, Direction, IoPart, StreamError, TransportError};

use super::{LONG, MIB, block};

const SHORT: Duration = Duration::from_millis(60);

/// One direction of a stream, in memory.
#[derive(Debug, Default)]
struct Pipe {
    state: Mutex<Bytes>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Bytes {
    there: VecDeque<u8>,
    is_over: bool,
}

/// One end of a stream, over two pipes.
#[derive(Debug)]
struct End {
    from: Arc<Pipe>,
    to: Arc<Pipe>,
    /// Maximum number of bytes in a pipe.
    room: usize,
}

impl ByteStream for End {
    fn read(&self, to: &mut [u8], limit: Option<Duration>) -> Result<usize, StreamError> {
        let mut state = self.from.state.lock();
        while state.there.is_empty() && !state.is_over {
            if self.from.changed.wait_for(&mut state, limit.unwrap_or(LONG)).timed_out() {
                return Err(StreamError::Quiet);
            }
        }
        let count = to.len().min(state.there.len());
        to.iter_mut().zip(state.there.drain(..count)).for_each(|(to, byte)| *to = byte);
        self.from.changed.notify_all();
        Ok(count)
    }

    fn write(&self, from: &[u8], limit: Option<Duration>) -> Result<usize, StreamError> {
        let mut state = self.to.state.lock();
        while state.there.len() >= self.room {
            if self.to.changed.wait_for(&mut state, limit.unwrap_or(LONG)).timed_out() {
                return Err(StreamError::Quiet);
            }
        }
        if state.is_over {
            let ended = RdmaError::Ended { peer: "10.0.0.2:1".into(), event: Some(Event::Disconnected) };
            return Err(ended.into());
        }
        let count = from.len().min(self.room - state.there.len());
        state.there.extend(&from[..count]);
        self.to.changed.notify_all();
        Ok(count)
    }

    fn finish_writing(&self) -> Result<(), StreamError> {
        self.to.state.lock().is_over = true;
        self.to.changed.notify_all();
        Ok(())
    }

    fn finish_reading(&self) {
        self.from.state.lock().is_over = true;
        self.from.changed.notify_all();
    }

    fn shutdown(&self) {
        self.finish_reading();
        let _ = self.finish_writing();
    }

    fn peer_has_closed(&self) -> bool {
        self.from.state.lock().is_over
    }

    fn unsent_bytes(&self) -> u64 {
        self.to.state.lock().there.len() as u64
    }
}

fn pair(room: usize) -> (Channel, Channel) {
    let pipes = [(); 2].map(|()| Arc::new(Pipe::default()));
    let end = |from: usize| End { from: pipes[from].clone(), to: pipes[1 - from].clone(), room };
    (Channel::over(Arc::new(end(0)), "rdma:one"), Channel::over(Arc::new(end(1)), "rdma:other"))
}

#[test]
fn bytes_and_guest_memory_arrive_and_are_counted() {
    let (one, other) = pair(10_000);
    let (from, to) = (block(MIB), block(MIB));
    from.slice(0, MIB).unwrap().copy_from(&(0..MIB).map(|at| (at % 241) as u8).collect::<Vec<_>>()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            one.write_all(b"head").unwrap();
            one.write_parts(&[IoPart::Bytes(b"page"), IoPart::Ram(from.slice(0, MIB).unwrap())]).unwrap();
            one.finish_writing().unwrap();
        });
        assert_eq!(other.peek(2).unwrap(), b"he");
        let mut head = [0; 8];
        other.read_exact(&mut head).unwrap();
        assert_eq!(&head, b"headpage");
        other.read_into_ram(&[to.slice(0, MIB).unwrap()]).unwrap();
        assert_eq!(other.read_some(&mut head).unwrap(), 0);
    });

    let bytes = [&from, &to].map(|block| {
        let mut bytes = vec![0; MIB];
        block.read(0, &mut bytes).unwrap();
        bytes
    });
    assert_eq!(bytes[0], bytes[1]);
    assert_eq!((one.bytes_written(), other.bytes_read()), (8 + MIB as u64, 8 + MIB as u64));
    assert!(other.peer_has_closed());
    assert!(one.socket().is_none());
}

#[test]
fn silence_stalls_both_directions_and_company_excuses_reading() {
    let (one, other) = pair(100);
    other.set_stall_limit(Some(SHORT));
    let stalled = other.read_exact(&mut [0; 1]).unwrap_err();
    assert!(matches!(stalled, TransportError::Stalled { direction: Direction::Read, .. }), "{stalled}");

    other.write_all(&[0; 100]).unwrap();
    assert_eq!(other.unsent_bytes(), 100);
    let stalled = other.write_all(&[0]).unwrap_err();
    let TransportError::Stalled { direction: Direction::Write, offset: 100, .. } = stalled else {
        panic!("{stalled}")
    };

    // Another channel of the same group receives bytes.
    let (busy, busy_peer) = Channel::pair().unwrap();
    let group = ChannelGroup::new();
    for channel in [&other, &busy] {
        channel.join(&group);
        channel.set_stall_limit(Some(SHORT * 4));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..20 {
                std::thread::sleep(SHORT / 2);
                busy_peer.write_all(&[1]).unwrap();
                busy.read_exact(&mut [0; 1]).unwrap();
            }
            one.write_all(&[9]).unwrap();
        });
        let mut byte = [0];
        other.read_exact(&mut byte).unwrap();
        assert_eq!(byte, [9]);
    });
}

#[test]
fn shutdown_cancels_and_a_broken_stream_is_a_reset() {
    let (one, other) = pair(100);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| one.read_exact(&mut [0; 1]).unwrap_err());
        std::thread::sleep(SHORT);
        one.shutdown();
        assert!(reading.join().unwrap().is_cancelled());
    });
    assert!(one.write_all(b"x").unwrap_err().is_cancelled());

    let gone = other.write_all(b"x").unwrap_err();
    assert!(gone.is_peer_gone(), "{gone}");
    assert!(gone.to_string().contains("the connection was closed"), "{gone}");
    let closed = other.read_exact(&mut [0; 3]).unwrap_err();
    assert!(matches!(closed, TransportError::Closed { missing: 3, .. }), "{closed}");
}
