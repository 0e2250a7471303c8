//! Questions to the kernel over netlink(7), and their answers.

use std::io;

use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload,
    NetlinkSerializable,
};

/// Largest answer of the kernel to one read of a dump (`netlink_dump` in `net/netlink/af_netlink.c`).
const ANSWER_BYTES: usize = 32 * 1024;

/// A connection to one subsystem of the kernel, in the network namespace of the thread that made it.
pub(crate) struct Netlink(netlink_sys::Socket);

impl Netlink {
    /// Connects to the subsystem of this number, as `NETLINK_ROUTE`.
    ///
    /// # Errors
    /// A socket cannot be made.
    pub(crate) fn connect(subsystem: isize) -> io::Result<Self> {
        let mut socket = netlink_sys::Socket::new(subsystem)?;
        socket.bind_auto()?;
        socket.connect(&netlink_sys::SocketAddr::new(0, 0))?;
        Ok(Self(socket))
    }

    /// Asks for everything of a kind.
    ///
    /// # Errors
    /// The kernel refuses, or cannot be understood.
    pub(crate) fn dump<M: NetlinkSerializable + NetlinkDeserializable>(&self, question: M) -> io::Result<Vec<M>> {
        self.send(NLM_F_REQUEST | NLM_F_DUMP, question)?;
        let mut found = Vec::new();
        loop {
            let answer = self.receive()?;
            let mut rest = answer.as_slice();
            while !rest.is_empty() {
                let message = parse::<M>(rest)?;
                rest = rest.get(aligned(message.header.length)..).unwrap_or_default();
                match message.payload {
                    NetlinkPayload::InnerMessage(message) => found.push(message),
                    NetlinkPayload::Done(_) => return Ok(found),
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    _ => {}
                }
            }
        }
    }

    /// Asks something that has one answer. None: the kernel has done it, and says no more.
    ///
    /// # Errors
    /// The kernel refuses, or cannot be understood.
    pub(crate) fn ask<M, A>(&self, flags: u16, question: M) -> io::Result<Option<A>>
    where
        M: NetlinkSerializable,
        A: NetlinkDeserializable,
    {
        self.send(NLM_F_REQUEST | flags, question)?;
        match parse::<A>(&self.receive()?)?.payload {
            NetlinkPayload::InnerMessage(answer) => Ok(Some(answer)),
            NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io()),
            _ => Ok(None),
        }
    }

    fn send<M: NetlinkSerializable>(&self, flags: u16, message: M) -> io::Result<()> {
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.0.send(&bytes, 0).map(drop)
    }

    fn receive(&self) -> io::Result<Vec<u8>> {
        let mut answer = Vec::with_capacity(ANSWER_BYTES);
        self.0.recv(&mut answer, 0)?;
        Ok(answer)
    }
}

fn parse<M: NetlinkDeserializable>(bytes: &[u8]) -> io::Result<NetlinkMessage<M>> {
    NetlinkMessage::deserialize(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
}

/// `NLMSG_ALIGN` of `include/uapi/linux/netlink.h`.
const fn aligned(length: u32) -> usize {
    (length as usize).next_multiple_of(4)
}
