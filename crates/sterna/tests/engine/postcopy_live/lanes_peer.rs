//! Hand-made multifd channels, for either side.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sterna::Address;
use sterna::ram::PAGE_SIZE;
use sterna_guests::process::ProcessConfig;
use sterna_wire::multifd::{
    BlockTable, InitialPacket, Method, RAM_PACKET_BYTES, RamPacketEncoder, RamPacketView,
};

use crate::support::port;

const PATIENCE: Duration = Duration::from_secs(30);

/// A channel of a source.
pub struct LaneOfSource {
    pub stream: TcpStream,
    packets: RamPacketEncoder,
    number: u64,
}

impl LaneOfSource {
    pub fn connect(to: &Address, id: u8) -> Self {
        let mut stream = connect(to);
        let mut hello = Vec::new();
        InitialPacket { uuid: [0; 16], id }.encode(&mut hello);
        stream.write_all(&hello).unwrap();
        Self { stream, packets: RamPacketEncoder::new(Method::None), number: 0 }
    }

    /// Sends a packet with pages at these offsets. The pages need not exist.
    pub fn packet(&mut self, block: &str, normal: &[u64], zero: &[u64], payload: &[u8]) {
        self.packets.begin(block).unwrap();
        assert!(normal.iter().all(|offset| self.packets.push_normal(*offset)));
        assert!(zero.iter().all(|offset| self.packets.push_zero(*offset)));
        let header = *self.packets.finish(self.number, payload.len() as u32);
        self.write(&header, payload);
    }

    /// Sends a packet with differences to pages at these offsets.
    pub fn differences(&mut self, block: &str, offset: u64, payload: &[u8]) {
        self.packets.begin(block).unwrap();
        assert!(self.packets.push_normal(offset));
        let header = *self.packets.finish_differences(self.number, payload.len() as u32);
        self.write(&header, payload);
    }

    pub fn sync(&mut self) {
        let packet = *self.packets.sync(self.number);
        self.write(&packet, &[]);
    }

    fn write(&mut self, header: &[u8], payload: &[u8]) {
        self.number += 1;
        // After a refusal the peer no longer reads.
        let _ = self.stream.write_all(header).and_then(|()| self.stream.write_all(payload));
    }
}

/// A page: block, offset, content.
pub type Page = (usize, u64, Vec<u8>);

/// Packets of one channel. Packets without pages are SYNCs.
pub type Packets = Vec<Vec<Page>>;

/// The channels of a destination. A thread reads each of them.
pub struct LanesOfDestination {
    state: Arc<State>,
    threads: Vec<JoinHandle<()>>,
}

struct State {
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    came: Vec<Packets>,
    /// Whether each channel reads only one more packet.
    is_held: bool,
}

impl LanesOfDestination {
    pub fn read(streams: Vec<TcpStream>, config: &ProcessConfig) -> Self {
        let inner = Inner { came: vec![Vec::new(); streams.len()], is_held: false };
        let state = Arc::new(State { inner: Mutex::new(inner), changed: Condvar::new() });
        let blocks: Vec<_> = config.blocks.clone();
        let threads = streams
            .into_iter()
            .enumerate()
            .map(|(index, stream)| {
                let (state, blocks) = (Arc::clone(&state), blocks.clone());
                std::thread::spawn(move || read(index, stream, &state, blocks))
            })
            .collect();
        Self { state, threads }
    }

    pub fn hold(&self, is_held: bool) {
        self.state.inner.lock().is_held = is_held;
        self.state.changed.notify_all();
    }

    /// Waits until `what` is true for each channel's packets.
    pub fn until(&self, what: impl Fn(&Packets) -> bool) {
        let mut inner = self.state.inner.lock();
        while !inner.came.iter().all(&what) {
            let waited = self.state.changed.wait_for(&mut inner, PATIENCE);
            assert!(!waited.timed_out(), "{:?}", inner.came.iter().map(Vec::len).collect::<Vec<_>>());
        }
    }

    /// Packets that have arrived since the last call, for each channel.
    pub fn take(&self) -> Vec<Packets> {
        self.state.inner.lock().came.iter_mut().map(std::mem::take).collect()
    }

    /// Waits until the source has closed the channels.
    pub fn end(self) -> Vec<Packets> {
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        std::mem::take(&mut self.state.inner.lock().came)
    }
}

fn read(index: usize, mut stream: TcpStream, state: &State, blocks: Vec<(String, u64)>) {
    let table = BlockTable::new(blocks).unwrap();
    stream.read_exact(&mut [0; InitialPacket::BYTES]).unwrap();
    let mut header = [0; RAM_PACKET_BYTES];
    while stream.read_exact(&mut header).is_ok() {
        let view = RamPacketView::decode(&header, &table, Method::None).unwrap();
        let mut payload = vec![0; view.payload_bytes()];
        if stream.read_exact(&mut payload).is_err() {
            return;
        }
        let block = view.block().unwrap_or(0);
        let contents = payload.chunks(PAGE_SIZE).map(<[u8]>::to_vec);
        let normal = view.normal().zip(contents).map(|(offset, content)| (block, offset, content));
        let zero = view.zero().map(|offset| (block, offset, vec![0; PAGE_SIZE]));
        let packet: Vec<_> = normal.chain(zero).collect();
        assert_eq!(packet.is_empty(), view.is_sync());
        let mut inner = state.inner.lock();
        inner.came[index].push(packet);
        state.changed.notify_all();
        while inner.is_held {
            state.changed.wait(&mut inner);
        }
    }
}

pub fn connect(to: &Address) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port(to))).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}
