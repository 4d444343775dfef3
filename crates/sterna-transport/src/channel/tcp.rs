//! Delivery statistics and pacing of a TCP channel, from the kernel. The engine detects congestion with them.

use std::time::Duration;

use super::Channel;
use crate::delivery::Delivery;
use crate::socket;

impl Channel {
    /// The delivery statistics. `None` if the channel is not TCP, or the kernel does not report them.
    pub fn delivery(&self) -> Option<Delivery> {
        let delivery = socket::delivery(self.socket()?)?;
        let least = self.first_round_trip.unwrap_or(Duration::MAX).min(delivery.least_round_trip);
        Some(Delivery { least_round_trip: least, ..delivery })
    }

    /// Limits sending to `bytes_per_second`. Does nothing if the channel is not TCP.
    ///
    /// Bytes beyond the rate wait in the socket, and then the writer blocks.
    pub fn pace(&self, bytes_per_second: u64) {
        if let Some(socket) = self.socket() {
            socket::pace(socket, bytes_per_second);
        }
    }

    /// Bytes that were written and that the peer's kernel has not acknowledged.
    ///
    /// They are unsent or in flight.
    ///
    /// For a Unix socket as [`Channel::unsent_bytes`].
    pub fn outstanding_bytes(&self) -> u64 {
        self.socket().map_or_else(|| self.unsent_bytes(), socket::outstanding)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::{Address, CancelFlag, Listener};

    fn connected() -> (Channel, Channel) {
        let listener = Listener::bind(&Address::Tcp { host: "127.0.0.1".into(), port: 0 }).unwrap();
        let (cancel, limit) = (CancelFlag::new(), Duration::from_secs(10));
        let here = Channel::connect(&listener.local_address(), limit, &cancel).unwrap();
        (here, listener.accept(Some(limit), &cancel).unwrap())
    }

    #[test]
    fn delivery_counts_what_the_peer_has_and_what_is_outstanding() {
        let (here, there) = connected();
        let before = here.delivery().expect("TCP");
        assert!(before.least_round_trip > Duration::ZERO && before.least_round_trip <= before.round_trip);
        here.write_all(&[7; 1 << 16]).unwrap();
        there.read_exact(&mut [0; 1 << 16]).unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while here.outstanding_bytes() > 0 && Instant::now() < until {
            std::thread::yield_now();
        }
        let after = here.delivery().unwrap();
        assert_eq!(after.acknowledged_bytes - before.acknowledged_bytes, 1 << 16);
        assert_eq!(after.queueing(), after.round_trip - after.least_round_trip);
        assert!(after.busy >= before.busy);
    }

    #[test]
    fn paced_channel_takes_its_time() {
        let (here, there) = connected();
        here.pace(4_000_000);
        let began = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| there.read_exact(&mut vec![0; 1 << 20]).unwrap());
            here.write_all(&vec![7; 1 << 20]).unwrap();
        });
        // The nominal time is 250 ms. The check is weaker because the kernel does not pace within one burst.
        assert!(began.elapsed() > Duration::from_millis(100), "{:?}", began.elapsed());
    }

    #[test]
    fn channel_that_is_no_tcp_has_no_delivery() {
        let (here, _there) = Channel::pair().unwrap();
        assert_eq!(here.delivery(), None);
        here.pace(1);
        here.write_all(&[1; 4096]).unwrap();
        assert!(here.outstanding_bytes() >= 4096);
    }
}
