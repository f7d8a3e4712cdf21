class Event:
    def query(self):
        return True


ours, theirs = rows, MetadataBuffers(columns, n_rows=256)
decode = DecodeNode(made(), topology, aux="rdma", metadata=theirs)
receiver, sender = decode.receive("request", directory=node.directory_address), node.send("request")
pages, token, hidden, event = [1, 2], 7, torch.ones(4096), Event()
sender.chunk([3, 4])
